/* Deltas (native/deltas.py): the words in which two payloads differ, found, coded, and added to memory. */
#ifndef WEIGHTCAST_DELTA_H
#define WEIGHTCAST_DELTA_H

#include "core.h"

#define WC_DELTA_WORDS ((size_t)1 << 20) /* of a chunk */
#define WC_DELTA_ROW_BYTES 8             /* of a delta's table, for each chunk */
#define WC_RUN_ROW_WORDS 4
#define WC_CODE_SLACK 8 /* bytes that a writer may spoil behind a code */

/* How the words of a chunk are coded: in its row of the table. */
enum { WC_UNCHANGED, WC_GAPS, WC_CLASSES, WC_DENSE, WC_NUM_CODES };

/* Words of a payload from `first` on that follow one another in a tensor from its word `position` on. */
typedef struct {
    uint64_t first, count, position, tensor;
} wc_run_row;

/* The code of changes. */
typedef struct {
    unsigned gap_bits, run_bits, order; /* of Rice codes, and of the exponential Golomb code */
    size_t num_large;
    uint64_t num_bytes;
} wc_code;

/* Choose a code; `num_bytes` is then what it takes. */
wc_code wc_choose(const wc_changes *changes);
uint8_t *wc_write(const wc_code *code, const wc_changes *changes, uint8_t *to);
/* Append at most `room` changes of `num_words`. Returns where their code ends, or NULL if it is damaged. */
const uint8_t *wc_read(const uint8_t *from, const uint8_t *end, size_t num_words, size_t width, size_t room,
                       wc_changes *changes);

/* By classes. Returns the end, or NULL if it would take `limit` bytes. `scratch` has room for the changes of a chunk, to
   write for those of each class. */
uint8_t *wc_write_classes(const wc_vectors *by, const uint8_t *base, size_t num_words, size_t width,
                          const wc_changes *changes, wc_changes *scratch, uint64_t limit, uint8_t *to);
const uint8_t *wc_read_classes(const wc_vectors *by, const uint8_t *from, const uint8_t *end, const uint8_t *base,
                               size_t num_words, size_t width, size_t room, wc_changes *scratch, wc_changes *changes);

/* The bytes that `wc_encode` needs at `out`; it may use fewer. */
uint64_t wc_encode_room(uint64_t num_words, size_t width);

typedef struct {
    uint8_t *base;
    const uint8_t *words;
    uint64_t num_words;
    size_t width; /* of a word: 1, 2 or 4 bytes */
    int by_classes, advance;
    uint8_t *out; /* NULL: words are only counted */
    /* what it gives: the delta's size, 0 if it is none, and how many words differ */
    uint64_t num_bytes;
    _Atomic uint64_t changed;
    _Atomic int failed; /* for want of memory */
} wc_encoding;

void wc_encode(const wc_vectors *by, wc_encoding *all, int threads);

extern const char wc_no_memory[]; /* the reason that is not the delta's */

/* The number of changes that a delta says that it has; a reason if its table is damaged. */
const char *wc_delta_count(const uint8_t *delta, uint64_t size, uint64_t num_words, size_t width, int has_base,
                           uint64_t *count);
/* Fill `changes`, which have room for that number. Returns a reason if the delta is damaged. */
const char *wc_decode(const wc_vectors *by, const uint8_t *delta, uint64_t size, const uint8_t *base,
                      uint64_t num_words, size_t width, const wc_changes *changes, int threads);

/* The first change whose position is not above the one before and below `num_words`, or their number. */
size_t wc_bad_change(const wc_changes *changes, uint64_t num_words);
/* Add differences, or subtract them, where words lie one after the other. */
void wc_apply(uint8_t *words, size_t width, const wc_changes *changes, int subtract, int threads);
/* The same where copies would bring the words; a row's source is an offset in the payload. */
void wc_scatter(const wc_strided_row *rows, size_t count, size_t width, const wc_changes *changes, int subtract,
                int threads);
/* The first row whose source words don't lie in a payload of so many, or are cut, or `count`. */
size_t wc_bad_scatter(const wc_strided_row *rows, size_t count, uint64_t num_words, size_t width);
/* Add to the sums of each tensor what its digest changes by; rows are in order and don't overlap. */
void wc_digest_changes(const wc_run_row *rows, size_t count, const wc_changes *changes, wc_sums *sums, int threads);
size_t wc_bad_runs(const wc_run_row *rows, size_t count, uint64_t num_words, uint64_t num_tensors);

#endif
