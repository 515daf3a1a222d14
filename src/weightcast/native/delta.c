/* Deltas: a table with a row for each chunk of words, then the codes of the chunks (native/deltas.py). */
#include "delta.h"

#include <stdlib.h>
#include <string.h>

const char wc_no_memory[] = "there is not enough memory";

static size_t num_chunks(uint64_t num_words) {
    return (size_t)(num_words / WC_DELTA_WORDS + (num_words % WC_DELTA_WORDS != 0));
}

static size_t words_of(uint64_t num_words, size_t chunk) {
    uint64_t left = num_words - (uint64_t)chunk * WC_DELTA_WORDS;
    return left < WC_DELTA_WORDS ? (size_t)left : WC_DELTA_WORDS;
}

static uint64_t dense_bytes(size_t num_words, size_t width) { return num_words * width + (num_words + 7) / 8; }

/* Chunks that a thread takes at a time: several, since they share one scratch memory. */
static size_t grain(size_t chunks, int threads) {
    size_t share = chunks / (4 * (size_t)(threads > 0 ? threads : 1));
    return share ? share : 1;
}

/* Allocate room for the changes of `chunks` chunks. Pages that stay unused cost no memory. */
static int make_scratch(uint64_t num_words, size_t chunks, wc_changes *made) {
    size_t count = chunks * (num_words < WC_DELTA_WORDS ? (size_t)num_words : WC_DELTA_WORDS);
    made->differences = malloc(count * sizeof *made->differences + (count + WC_DETECT_SLACK) * sizeof *made->positions);
    made->positions = made->differences ? (uint32_t *)(made->differences + count) : NULL;
    made->count = 0;
    return made->differences != NULL;
}

static uint64_t place_bytes(size_t width) { return dense_bytes(WC_DELTA_WORDS, width) + WC_CODE_SLACK; }

uint64_t wc_encode_room(uint64_t num_words, size_t width) {
    size_t chunks = num_chunks(num_words);
    uint64_t last = chunks ? dense_bytes(words_of(num_words, chunks - 1), width) + 2 * WC_CODE_SLACK : 0;
    return chunks * (uint64_t)WC_DELTA_ROW_BYTES + (chunks ? chunks - 1 : 0) * place_bytes(width) + last;
}

static uint8_t *write_dense(const wc_changes *changes, size_t num_words, size_t width, uint8_t *to) {
    uint8_t *signs = to + num_words * width;
    memset(to, 0, dense_bytes(num_words, width));
    for (size_t i = 0; i < changes->count; i++) {
        uint32_t at = changes->positions[i];
        memcpy(to + at * width, &changes->differences[i], width);
        signs[at / 8] |= (uint8_t)((changes->differences[i] < 0) << at % 8);
    }
    return to + dense_bytes(num_words, width);
}

static const uint8_t *read_dense(const uint8_t *from, size_t num_words, size_t width, size_t room,
                                 wc_changes *changes) {
    const uint8_t *signs = from + num_words * width;
    for (size_t at = 0; at < (num_words + 7) / 8 * 8; at++) {
        int is_negative = signs[at / 8] >> at % 8 & 1;
        uint64_t word = 0;
        if (at < num_words)
            memcpy(&word, from + at * width, width);
        if (!word && !is_negative)
            continue;
        if (!word || changes->count == room)
            return NULL;
        changes->positions[changes->count] = (uint32_t)at;
        changes->differences[changes->count++] = (int64_t)word - ((int64_t)is_negative << 8 * width);
    }
    return signs + (num_words + 7) / 8;
}

static void encode_chunk(const wc_vectors *by, wc_encoding *all, size_t chunk, wc_changes *changes,
                         wc_changes *scratch) {
    size_t first = chunk * WC_DELTA_WORDS, count = words_of(all->num_words, chunk), width = all->width;
    uint8_t *base = all->base + first * width;
    changes->count = 0;
    /* Don't advance the base yet if classes are still to be found in it. */
    by->detect(base, all->words + first * width, count, width, all->advance && !all->by_classes, changes);
    atomic_fetch_add_explicit(&all->changed, changes->count, memory_order_relaxed);
    wc_digest_changes(all->pieces, all->num_pieces, first, changes);
    if (all->out) {
        uint8_t *to = all->out + num_chunks(all->num_words) * WC_DELTA_ROW_BYTES + chunk * place_bytes(width), *end = to;
        uint64_t dense = dense_bytes(count, width);
        uint32_t kind = WC_UNCHANGED;
        if (changes->count && all->by_classes) {
            kind = WC_CLASSES;
            end = wc_write_classes(by, base, count, width, changes, scratch, dense, to);
        } else if (changes->count) {
            wc_code code = wc_choose(changes);
            kind = WC_GAPS;
            end = code.num_bytes < dense ? wc_write(&code, changes, to) : NULL;
        }
        if (!end) {
            kind = WC_DENSE;
            end = write_dense(changes, count, width, to);
        }
        uint32_t row[2] = {(uint32_t)(end - to), (uint32_t)changes->count | kind << 24};
        memcpy(all->out + chunk * WC_DELTA_ROW_BYTES, row, sizeof row);
    }
    if (all->advance && all->by_classes)
        wc_apply(base, width, changes, NULL, NULL, NULL, 1);
}

typedef struct {
    const wc_vectors *by;
    wc_encoding *all;
} encode_context;

static void encode_chunks(void *context, size_t first, size_t last) {
    encode_context *of = context;
    wc_changes changes, scratch = {NULL, NULL, 0};
    int is_made = make_scratch(of->all->num_words, 1, &changes) &&
                  (!of->all->by_classes || make_scratch(of->all->num_words, WC_MAX_CLASSES, &scratch));
    if (!is_made)
        atomic_store(&of->all->failed, 1);
    for (size_t chunk = first; is_made && chunk < last; chunk++)
        encode_chunk(of->by, of->all, chunk, &changes, &scratch);
    free(changes.differences);
    free(scratch.differences);
}

void wc_encode(const wc_vectors *by, wc_encoding *all, int threads) {
    size_t chunks = num_chunks(all->num_words);
    encode_context context = {by, all};
    atomic_init(&all->changed, 0);
    atomic_init(&all->failed, 0);
    all->num_bytes = 0;
    if (chunks)
        wc_parallel(encode_chunks, &context, chunks, grain(chunks, threads), threads);
    if (!all->out || atomic_load(&all->failed))
        return;
    uint64_t at = chunks * (uint64_t)WC_DELTA_ROW_BYTES;
    for (size_t chunk = 0; chunk < chunks; chunk++) {
        uint32_t size;
        memcpy(&size, all->out + chunk * WC_DELTA_ROW_BYTES, 4);
        memmove(all->out + at, all->out + chunks * WC_DELTA_ROW_BYTES + chunk * place_bytes(all->width), size);
        at += size;
    }
    memset(all->out + at, 0, (8 - at % 8) % 8);
    at += (8 - at % 8) % 8;
    if (at < all->num_words * all->width)
        all->num_bytes = at;
}

typedef struct {
    size_t size, count;
    unsigned kind;
} row;

static row row_at(const uint8_t *delta, size_t chunk) {
    uint32_t words[2];
    memcpy(words, delta + chunk * WC_DELTA_ROW_BYTES, sizeof words);
    return (row){words[0], words[1] & 0xFFFFFF, words[1] >> 24};
}

const char *wc_delta_count(const uint8_t *delta, uint64_t size, uint64_t num_words, size_t width, int has_base,
                           uint64_t *count) {
    size_t chunks = num_chunks(num_words);
    uint64_t at = chunks * (uint64_t)WC_DELTA_ROW_BYTES;
    *count = 0;
    if (size % 8 || size < at)
        return "it is shorter than its table, or not a multiple of 8 bytes long";
    for (size_t chunk = 0; chunk < chunks; chunk++) {
        row each = row_at(delta, chunk);
        size_t words = words_of(num_words, chunk);
        if (each.kind >= WC_NUM_CODES || each.count > words || !each.count != (each.kind == WC_UNCHANGED) ||
            !each.size != (each.kind == WC_UNCHANGED) || each.size > dense_bytes(words, width) ||
            each.count > 4 * (uint64_t)each.size || /* each change takes at least two bits */
            (each.kind == WC_DENSE && each.size != dense_bytes(words, width)))
            return "a row of its table is invalid";
        if (each.kind == WC_CLASSES && !has_base)
            return "it is coded by classes and needs a base, and none was given";
        at += each.size;
        *count += each.count;
    }
    if (at > size || size - at >= 8)
        return "its length is not that of its table and chunks";
    for (; at < size; at++)
        if (delta[at])
            return "the bytes after its last chunk are not zeros";
    return NULL;
}

typedef struct {
    const wc_vectors *by;
    const uint8_t *delta, *base;
    uint64_t num_words;
    size_t width;
    const wc_changes *changes;
    _Atomic(const char *) wrong;
} decoding;

static int decode_chunk(const decoding *all, size_t chunk, row of, const uint8_t *from, wc_changes *scratch,
                        wc_changes *changes) {
    size_t words = words_of(all->num_words, chunk), first = chunk * WC_DELTA_WORDS;
    const uint8_t *end = from + of.size;
    switch (of.kind) {
    case WC_GAPS:
        from = wc_read(from, end, words, all->width, of.count, changes);
        break;
    case WC_CLASSES:
        from = wc_read_classes(all->by, from, end, all->base + first * all->width, words, all->width, of.count,
                               scratch, changes);
        break;
    case WC_DENSE:
        from = read_dense(from, words, all->width, of.count, changes);
        break;
    }
    if (from != end || changes->count != of.count)
        return 1;
    for (size_t i = 0; i < changes->count; i++)
        changes->positions[i] += (uint32_t)first;
    return 0;
}

static void decode_chunks(void *context, size_t first, size_t last) {
    decoding *all = context;
    size_t chunks = num_chunks(all->num_words), done = 0;
    const uint8_t *from = all->delta + chunks * WC_DELTA_ROW_BYTES;
    wc_changes scratch = {NULL, NULL, 0};
    for (size_t chunk = 0; chunk < last; chunk++) {
        row of = row_at(all->delta, chunk);
        if (chunk >= first) {
            wc_changes changes = {all->changes->positions + done, all->changes->differences + done, 0};
            if (of.kind == WC_CLASSES && !scratch.differences && !make_scratch(all->num_words, 1, &scratch)) {
                atomic_store(&all->wrong, wc_no_memory);
                return;
            }
            if (decode_chunk(all, chunk, of, from, &scratch, &changes)) {
                atomic_store(&all->wrong, "one of its chunks is damaged");
                break;
            }
        }
        from += of.size;
        done += of.count;
    }
    free(scratch.differences);
}

const char *wc_decode(const wc_vectors *by, const uint8_t *delta, uint64_t size, const uint8_t *base,
                      uint64_t num_words, size_t width, const wc_changes *changes, int threads) {
    uint64_t count;
    const char *wrong = wc_delta_count(delta, size, num_words, width, base != NULL, &count);
    if (wrong)
        return wrong;
    if (count != changes->count)
        return "its number of changes is not the length of the given arrays";
    decoding all = {
        .by = by, .delta = delta, .base = base, .num_words = num_words, .width = width, .changes = changes};
    atomic_init(&all.wrong, NULL);
    size_t chunks = num_chunks(num_words);
    if (chunks)
        wc_parallel(decode_chunks, &all, chunks, grain(chunks, threads), threads);
    return atomic_load(&all.wrong);
}
