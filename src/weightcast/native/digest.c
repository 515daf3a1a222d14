/* nh-128, the digest of a bucket (format/bucket_digest.py): of bytes in place, or while they are copied. */
#include "core.h"

#include <string.h>

enum { CHUNKS = 64 }; /* that a thread takes at a time */

typedef struct {
    const wc_vectors *by;
    uint8_t *payload;
    uint64_t size, first;
    const wc_pack_row *rows;
    size_t count;
    wc_sums *sums;
    uint64_t *lanes;
    int stream;
} digesting;

/* Return the upper 64 bits of a product. */
static uint64_t high_word(uint64_t x, uint64_t y) {
#ifdef __SIZEOF_INT128__
    return (uint64_t)((__extension__(unsigned __int128)x * y) >> 64);
#else
    uint64_t x0 = (uint32_t)x, x1 = x >> 32, y0 = (uint32_t)y, y1 = y >> 32, inner = x0 * y1, outer = x1 * y0;
    uint64_t carry = (x0 * y0 >> 32) + (uint32_t)inner + (uint32_t)outer;
    return x1 * y1 + (inner >> 32) + (outer >> 32) + (carry >> 32);
#endif
}

static void add_chunk(uint64_t chunk, const uint64_t lanes[2], uint64_t sums[2]) {
    uint64_t x = lanes[0] + wc_mixed(0xC0AC29B7C97C50DDu + chunk), y = lanes[1] + wc_mixed(0x3F84D5B5B5470917u + chunk);
    sums[0] += x * y;
    sums[1] += high_word(x, y);
}

static void add_sums(const digesting *all, const uint64_t sums[2]) {
    atomic_fetch_add_explicit(&all->sums->low, sums[0], memory_order_relaxed);
    atomic_fetch_add_explicit(&all->sums->high, sums[1], memory_order_relaxed);
}

static void chunk_lanes(const digesting *all, uint64_t chunk, uint64_t lanes[2]) {
    uint64_t start = chunk * WC_CHUNK_BYTES, left = all->size - start;
    if (left >= WC_CHUNK_BYTES) {
        all->by->lanes(NULL, all->payload + start, 0, lanes);
    } else {
        uint8_t filled[WC_CHUNK_BYTES] = {0};
        memcpy(filled, all->payload + start, left);
        all->by->lanes(NULL, filled, 0, lanes);
    }
}

static void digest_chunks(void *context, size_t first, size_t last) {
    const digesting *all = context;
    uint64_t sums[2] = {0, 0}, lanes[2];
    for (uint64_t chunk = all->first + first; chunk < all->first + last; chunk++) {
        chunk_lanes(all, chunk, lanes);
        if (!chunk)
            sums[0] += all->size;
        add_chunk(chunk, lanes, sums);
    }
    add_sums(all, sums);
}

static uint64_t num_chunks(uint64_t size) { return size / WC_CHUNK_BYTES + (size % WC_CHUNK_BYTES != 0); }

void wc_digest(const wc_vectors *by, const uint8_t *payload, uint64_t size, uint64_t first, uint64_t last,
               wc_sums *sums, int threads) {
    digesting all = {.by = by, .payload = (uint8_t *)(uintptr_t)payload, .size = size, .first = first, .sums = sums};
    if (last > num_chunks(size))
        last = num_chunks(size);
    if (first < last)
        wc_parallel(digest_chunks, &all, last - first, CHUNKS, threads);
}

static void lanes_of_chunks(void *context, size_t first, size_t last) {
    const digesting *all = context;
    for (size_t chunk = first; chunk < last; chunk++)
        chunk_lanes(all, chunk, all->lanes + 2 * chunk);
}

void wc_lanes(const wc_vectors *by, const uint8_t *payload, uint64_t size, uint64_t *lanes, int threads) {
    digesting all = {.by = by, .payload = (uint8_t *)(uintptr_t)payload, .size = size, .lanes = lanes};
    if (size)
        wc_parallel(lanes_of_chunks, &all, num_chunks(size), CHUNKS, threads);
}

void wc_digest_lanes(const uint64_t *lanes, uint64_t size, wc_sums *sums) {
    digesting all = {.sums = sums};
    uint64_t found[2] = {size, 0};
    for (uint64_t chunk = 0; chunk < num_chunks(size); chunk++)
        add_chunk(chunk, lanes + 2 * chunk, found);
    add_sums(&all, found);
}

size_t wc_bad_pack(const wc_pack_row *rows, size_t count, uint64_t size) {
    uint64_t end = 0;
    for (size_t i = 0; i < count; i++) {
        if (rows[i].offset < end || rows[i].offset > size || rows[i].size > size - rows[i].offset)
            return i;
        end = rows[i].offset + rows[i].size;
    }
    return count;
}

/* Return the first row that ends after `offset`. */
static size_t row_at(const digesting *all, uint64_t offset) {
    size_t low = 0, high = all->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (all->rows[middle].offset + all->rows[middle].size <= offset)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Fill a chunk from several rows, or in part. Returns 1 if the rows cover all of it, so that it is digested. */
static int pack_pieces(const digesting *all, size_t row, uint64_t start, uint64_t end, uint64_t lanes[2]) {
    uint8_t *payload = all->payload, filled[WC_CHUNK_BYTES];
    uint64_t covered = 0;
    for (size_t i = row; i < all->count && all->rows[i].offset < end; i++) {
        const wc_pack_row *each = &all->rows[i];
        uint64_t from = each->offset > start ? each->offset : start;
        uint64_t to = each->offset + each->size < end ? each->offset + each->size : end;
        if (each->source)
            memcpy(filled + (from - start), (const uint8_t *)(uintptr_t)each->source + (from - each->offset), to - from);
        else
            memset(filled + (from - start), 0, to - from);
        covered += to - from;
    }
    if (covered == end - start) {
        memset(filled + covered, 0, WC_CHUNK_BYTES - covered);
        if (covered == WC_CHUNK_BYTES) {
            all->by->lanes(payload + start, filled, all->stream, lanes);
        } else {
            all->by->lanes(NULL, filled, 0, lanes);
            memcpy(payload + start, filled, covered);
        }
        return 1;
    }
    /* Write only the rows' own bytes: the caller fills the bytes between them. */
    for (size_t i = row; i < all->count && all->rows[i].offset < end; i++) {
        const wc_pack_row *each = &all->rows[i];
        uint64_t from = each->offset > start ? each->offset : start;
        uint64_t to = each->offset + each->size < end ? each->offset + each->size : end;
        if (each->source != (uint64_t)(uintptr_t)payload + each->offset)
            memcpy(payload + from, filled + (from - start), to - from);
    }
    return 0;
}

static void pack_chunks(void *context, size_t first, size_t last) {
    static const uint8_t zeros[WC_CHUNK_BYTES];
    const digesting *all = context;
    size_t row = row_at(all, (uint64_t)first * WC_CHUNK_BYTES);
    uint64_t sums[2] = {0, 0}, lanes[2];
    for (uint64_t chunk = first; chunk < last; chunk++) {
        uint64_t start = chunk * WC_CHUNK_BYTES;
        uint64_t end = all->size - start < WC_CHUNK_BYTES ? all->size : start + WC_CHUNK_BYTES;
        while (row < all->count && all->rows[row].offset + all->rows[row].size <= start)
            row++;
        if (row == all->count)
            break;
        const wc_pack_row *each = &all->rows[row];
        if (each->offset <= start && each->offset + each->size >= start + WC_CHUNK_BYTES) {
            const uint8_t *source =
                each->source ? (const uint8_t *)(uintptr_t)each->source + (start - each->offset) : zeros;
            uint8_t *target = all->payload + start;
            all->by->lanes(source == target ? NULL : target, source, all->stream, lanes);
        } else if (!pack_pieces(all, row, start, end, lanes)) {
            continue;
        }
        if (!chunk)
            sums[0] += all->size;
        add_chunk(chunk, lanes, sums);
    }
    wc_fence();
    add_sums(all, sums);
}

void wc_copy_and_digest(const wc_vectors *by, uint8_t *payload, uint64_t size, const wc_pack_row *rows, size_t count,
                        wc_sums *sums, int stream, int threads) {
    digesting all = {.by = by,
                     .payload = payload,
                     .size = size,
                     .rows = rows,
                     .count = count,
                     .sums = sums,
                     .stream = stream};
    if (size)
        wc_parallel(pack_chunks, &all, num_chunks(size), CHUNKS, threads);
}
