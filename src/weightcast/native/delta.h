/* Deltas (native/deltas.py has the format): find the words in which payloads differ, encode, decode, add to memory. */
#ifndef WEIGHTCAST_DELTA_H
#define WEIGHTCAST_DELTA_H

#include "core.h"

#define WC_DELTA_WORDS ((size_t)1 << 20) /* words of a chunk */
#define WC_DELTA_ROW_BYTES 8             /* row of a delta's table, one for each chunk */
#define WC_CODE_SLACK 8                  /* bytes after a code that a writer may overwrite */
#define WC_DETECT_SLACK 4                /* positions after those of the changes that detection may overwrite */

/* Kinds of chunks, as in the table. */
enum { WC_UNCHANGED, WC_GAPS, WC_CLASSES, WC_DENSE, WC_NUM_CODES };

/* Parameters of a code of changes, and its size. */
typedef struct {
    unsigned gap_bits, run_bits, order; /* g and r of the Rice codes, e of the exponential Golomb code */
    size_t num_large;
    uint64_t num_bytes;
} wc_code;

/* Choose the parameters of the shortest code. */
wc_code wc_choose(const wc_changes *changes);
uint8_t *wc_write(const wc_code *code, const wc_changes *changes, uint8_t *to);
/* Append at most `room` changes of `num_words` words. Returns the end of their code, or NULL if it is damaged. */
const uint8_t *wc_read(const uint8_t *from, const uint8_t *end, size_t num_words, size_t width, size_t room,
                       wc_changes *changes);

/* The same with codes by classes. Writing returns the end, or NULL if it would take `limit` bytes or more. `scratch`
   has room for the changes of a chunk, and for writing, of a chunk for each class. */
uint8_t *wc_write_classes(const wc_vectors *by, const uint8_t *base, size_t num_words, size_t width,
                          const wc_changes *changes, wc_changes *scratch, uint64_t limit, uint8_t *to);
const uint8_t *wc_read_classes(const wc_vectors *by, const uint8_t *from, const uint8_t *end, const uint8_t *base,
                               size_t num_words, size_t width, size_t room, wc_changes *scratch, wc_changes *changes);

/* Return the number of bytes that `wc_encode` needs at `out`; it may use fewer. */
uint64_t wc_encode_room(uint64_t num_words, size_t width);

typedef struct {
    uint8_t *base;
    const uint8_t *words;
    uint64_t num_words;
    size_t width; /* bytes of a word: 1, 2 or 4 */
    int by_classes, advance;
    uint8_t *out; /* NULL: only count the words that differ */
    wc_piece_row *pieces;
    size_t num_pieces;
    /* The results: the delta's size, 0 if it would be no shorter; the number of words that differ; 1 without memory. */
    uint64_t num_bytes;
    _Atomic uint64_t changed;
    _Atomic int failed;
} wc_encoding;

void wc_encode(const wc_vectors *by, wc_encoding *all, int threads);

extern const char wc_no_memory[]; /* a reason that is no damage of the delta */

/* Compute the number of changes from a delta's table. Returns NULL, or a reason if the table is damaged. */
const char *wc_delta_count(const uint8_t *delta, uint64_t size, uint64_t num_words, size_t width, int has_base,
                           uint64_t *count);
/* Fill `changes`, which have room for that number. Returns NULL, or a reason if the delta is damaged. */
const char *wc_decode(const wc_vectors *by, const uint8_t *delta, uint64_t size, const uint8_t *base,
                      uint64_t num_words, size_t width, const wc_changes *changes, int threads);

/* Return the first change whose position is not above the one before and below `num_words`, or their number. */
size_t wc_bad_change(const wc_changes *changes, uint64_t num_words);
/* Add differences to the words of a payload; store each of these words as it was and as it is, unless `words` is NULL.
   `lanes`, unless NULL, become those of the payload as it is, whose size is then a multiple of 8 bytes. */
void wc_apply(uint8_t *payload, size_t width, const wc_changes *changes, uint64_t *lanes, uint32_t *former,
              uint32_t *words, int threads);
/* Write the words of a payload that changed to where rows of copies bring them: a target that several rows have, such
   as a tied one, is right too. A row's source is an offset in the payload; `changes` have only their positions. */
void wc_scatter(const wc_strided_row *rows, size_t count, size_t width, const wc_changes *changes,
                const uint32_t *words, int threads);
/* Return the first row that has source words outside of a payload of `num_words`, or parts of words, or `count`. */
size_t wc_bad_scatter(const wc_strided_row *rows, size_t count, uint64_t num_words, size_t width);

#endif
