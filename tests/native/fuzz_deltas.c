/* Deltas of random payloads: coded, decoded, added and taken back; and damaged ones, which are refused or decode to
   positions that there are. */
#include "delta.h"
#include "fuzz.h"

typedef struct {
    uint8_t *base, *words, *delta;
    uint64_t num_words, size, changed;
    size_t width;
    int by_classes;
} pair;

static wc_changes room_for(uint64_t count) {
    wc_changes made = {malloc(4 * count + 1), malloc(8 * count + 1), count};
    REQUIRE(made.positions && made.differences);
    return made;
}

static void release(wc_changes *changes) {
    free(changes->positions);
    free(changes->differences);
}

/* A payload and another, which differs at some words by a little or by anything, seldom of more than one chunk. */
static pair a_pair(void) {
    pair made = {.width = (size_t)1 << drawn(3), .by_classes = (int)drawn(2)};
    made.num_words = drawn(60) ? drawn(drawn(4) ? 300 : 20000) : WC_DELTA_WORDS + drawn(5000);
    uint64_t bytes = made.num_words * made.width, density = drawn(3) ? drawn(101) : 1, kind = drawn(4);
    made.base = noise(bytes);
    made.words = malloc(bytes + 1);
    REQUIRE(made.words);
    memcpy(made.words, made.base, bytes);
    if (drawn(8) == 0)
        density = 100;
    for (uint64_t i = 0; i < made.num_words; i++) {
        uint64_t word = 0, former;
        memcpy(&word, made.base + i * made.width, made.width);
        former = word;
        if (drawn(100) < density)
            word = kind == 0 ? drawn(0) + state : kind == 1 ? word + 1 : kind == 2 ? ~word : word - drawn(9) + 4;
        memcpy(made.words + i * made.width, &word, made.width);
        made.changed += (word ^ former) << (64 - 8 * made.width) != 0;
    }
    return made;
}

/* Make rows of pieces with gaps between them, some without words, and their digests of these words. */
static size_t some_pieces(const pair *of, const uint8_t *words, wc_piece_row *pieces, size_t most, uint64_t seed) {
    size_t count = 0;
    state = seed;
    for (uint64_t at = drawn(3); count < most && at < of->num_words; count++) {
        uint64_t left = of->num_words - at, taken = count + 1 < most ? drawn(left < 9000 ? left + 1 : 9000) : left;
        pieces[count] = (wc_piece_row){at, taken, drawn(2) ? drawn(9000) : drawn(0) >> 20, {0, 0}};
        wc_words_dim dim = {taken, of->width, 1};
        if (taken)
            wc_digest_words(some_vectors(), (uint64_t)(uintptr_t)(words + at * of->width), of->width,
                            pieces[count].position, &dim, 1, &pieces[count].sums, 1);
        at += taken + drawn(2) * drawn(40);
    }
    return count;
}

/* With threads, vectors and advance as they come: the delta is the same, and digests follow it. */
static void encoded(pair *of) {
    uint64_t room = wc_encode_room(of->num_words, of->width), bytes = of->num_words * of->width;
    uint8_t *base = malloc(bytes + 1), *first = NULL;
    REQUIRE(base);
    for (int again = 0; again < 2; again++) {
        memcpy(base, of->base, bytes);
        wc_encoding all = {.base = base,
                           .words = of->words,
                           .num_words = of->num_words,
                           .width = of->width,
                           .by_classes = of->by_classes,
                           .advance = (int)drawn(2),
                           .out = malloc(room + 1)};
        wc_piece_row pieces[20], expected[20];
        uint64_t seed = state;
        all.pieces = pieces;
        all.num_pieces = some_pieces(of, of->base, pieces, 20, seed);
        REQUIRE(all.out && all.num_pieces == some_pieces(of, of->words, expected, 20, seed));
        wc_encode(some_vectors(), &all, (int)drawn(5));
        REQUIRE(!atomic_load(&all.failed) && atomic_load(&all.changed) == of->changed);
        REQUIRE(!memcmp(base, all.advance ? of->words : of->base, bytes));
        REQUIRE(!memcmp(pieces, expected, all.num_pieces * sizeof *pieces));
        REQUIRE(all.num_bytes % 8 == 0 && (!all.num_bytes || all.num_bytes < bytes));
        if (!again) {
            of->size = all.num_bytes;
            first = all.out;
            continue;
        }
        REQUIRE(all.num_bytes == of->size && !memcmp(first, all.out, of->size));
        free(all.out);
    }
    of->delta = malloc(of->size + 1);
    REQUIRE(of->delta);
    memcpy(of->delta, first, of->size);
    free(first);
    free(base);
}

static void release_pair(pair *of) {
    free(of->base);
    free(of->words);
    free(of->delta);
}

void deltas(void) {
    pair of = a_pair();
    encoded(&of);
    if (of.size) {
        uint64_t count, bytes = of.num_words * of.width;
        REQUIRE(!wc_delta_count(of.delta, of.size, of.num_words, of.width, 1, &count) && count == of.changed);
        wc_changes changes = room_for(count);
        REQUIRE(!wc_decode(some_vectors(), of.delta, of.size, of.base, of.num_words, of.width, &changes, (int)drawn(5)));
        REQUIRE(wc_bad_change(&changes, of.num_words) == count);
        uint8_t *payload = malloc(bytes), *target = malloc(bytes);
        uint32_t *former = malloc(4 * count + 1), *words = malloc(4 * count + 1);
        uint64_t chunks = (bytes + WC_CHUNK_BYTES - 1) / WC_CHUNK_BYTES;
        uint64_t *lanes = malloc(16 * chunks), *expected = malloc(16 * chunks);
        REQUIRE(payload && target && former && words && lanes && expected);
        memcpy(payload, of.base, bytes);
        wc_lanes(some_vectors(), of.base, bytes, lanes, (int)drawn(5));
        wc_lanes(some_vectors(), of.words, bytes, expected, (int)drawn(5));
        int has_lanes = bytes % 8 == 0;
        wc_apply(payload, of.width, &changes, has_lanes ? lanes : NULL, former, words, (int)drawn(5));
        REQUIRE(!memcmp(payload, of.words, bytes));
        REQUIRE(!has_lanes || !memcmp(lanes, expected, 16 * chunks));
        wc_sums sums = {0, 0}, all = {0, 0};
        wc_digest_lanes(expected, bytes, &sums);
        wc_digest(some_vectors(), of.words, bytes, 0, chunks, &all, (int)drawn(5));
        REQUIRE(atomic_load(&sums.low) == atomic_load(&all.low) && atomic_load(&sums.high) == atomic_load(&all.high));
        /* Every second word of a part, to the start of another memory, and back. */
        uint64_t first = drawn(of.num_words), taken = (of.num_words - first + 1) / 2, width = of.width;
        wc_strided_row row = {(uint64_t)(uintptr_t)target,
                              first * width,
                              width,
                              {{1, 0, 0}, {taken, width, 2 * width}, {1, 0, 0}}};
        REQUIRE(wc_bad_scatter(&row, 1, of.num_words, width) == 1);
        for (uint64_t i = 0; i < taken; i++)
            memcpy(target + i * width, of.base + (first + 2 * i) * width, width);
        for (int again = 0; again < 3; again++) { /* the third time it is as before already */
            wc_scatter(&row, 1, width, &changes, again ? former : words, 2);
            for (uint64_t i = 0; i < taken; i++)
                REQUIRE(!memcmp(target + i * width, (again ? of.base : of.words) + (first + 2 * i) * width, width));
        }
        free(payload);
        free(target);
        free(former);
        free(words);
        free(lanes);
        free(expected);
        release(&changes);
    }
    release_pair(&of);
}

void hostile_deltas(void) {
    pair of = a_pair();
    encoded(&of);
    for (int again = 0; of.size && again < 8; again++) {
        uint64_t size = drawn(4) ? of.size : drawn(of.size + 1), count, num_words = of.num_words;
        uint8_t *delta = malloc(size + 1), *exact;
        REQUIRE(delta);
        memcpy(delta, of.delta, size);
        for (uint64_t faults = drawn(4); faults && size; faults--)
            delta[drawn(drawn(2) ? size : size < 32 ? size : 32)] = (uint8_t)drawn(256);
        exact = malloc(size ? size : 1); /* so that a byte behind it is seen */
        REQUIRE(exact);
        memcpy(exact, delta, size);
        if (!drawn(8))
            num_words = drawn(of.num_words + 1);
        const uint8_t *base = drawn(8) ? of.base : NULL;
        if (!wc_delta_count(exact, size, num_words, of.width, base != NULL, &count)) {
            REQUIRE(count <= num_words && count <= 4 * size);
            wc_changes changes = room_for(count);
            if (!wc_decode(some_vectors(), exact, size, base, num_words, of.width, &changes, (int)drawn(3)))
                REQUIRE(wc_bad_change(&changes, num_words) == count);
            release(&changes);
        }
        free(delta);
        free(exact);
    }
    wc_strided_row row;
    uint64_t *numbers = (uint64_t *)&row;
    for (size_t k = 0; k < WC_STRIDED_WORDS; k++)
        numbers[k] = drawn(4) ? of.width * drawn(6) : drawn(2) ? UINT64_MAX - drawn(9) : (uint64_t)1 << drawn(64);
    uint64_t size = of.num_words * of.width, end = row.source + row.run;
    int is_empty = !row.run || !row.dims[0].count || !row.dims[1].count || !row.dims[2].count;
    if (wc_bad_scatter(&row, 1, of.num_words, of.width) && !is_empty) {
        for (size_t d = 0; d < WC_MAX_DIMS; d++)
            end += (row.dims[d].count - 1) * row.dims[d].source_stride;
        REQUIRE(end <= size && row.run <= size);
    }
    release_pair(&of);
}
