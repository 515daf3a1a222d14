/* The native core: copies, digests, fp8 and their threads. It takes addresses, uses no ABI of torch, and needs no GIL. */
#ifndef WEIGHTCAST_CORE_H
#define WEIGHTCAST_CORE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define WC_CHUNK_BYTES 2048 /* chunk of the digest nh-128 */
#define WC_CHUNK_WORDS (WC_CHUNK_BYTES / 8)
#define WC_MAX_THREADS 4
#define WC_MAX_DIMS 3 /* dims of a strided copy, besides its runs */
#define WC_MAX_BYTES ((uint64_t)1 << 47)
#define WC_DIGEST_BLOCK 4096 /* consecutive words of a tensor that share a weight B */
#define WC_MAX_CLASSES 6 /* classes of a delta */
#define WC_RUN_WORDS 2 /* 64-bit words of a row, also in the next three lines */
#define WC_LANES_WORDS 2
#define WC_COPY_WORDS 3
#define WC_STRIDED_WORDS (3 + 3 * WC_MAX_DIMS)
#define WC_MAX_WORDS_DIMS 64 /* dims of a tensor */
#define WC_MATRIX_WORDS 11
#define WC_PIECE_WORDS 5

/* A copy of `size` bytes. Target and source don't overlap. */
typedef struct {
    uint64_t target, source, size;
} wc_copy_row;

/* A copy of count[0] x count[1] x count[2] runs of `run` bytes; strides are in bytes. */
typedef struct {
    uint64_t target, source, run;
    struct {
        uint64_t count, target_stride, source_stride;
    } dims[WC_MAX_DIMS];
} wc_strided_row;

/* Bytes of a payload from `offset` on: copied from `source`; zeros if it is 0; kept if it is their own address. */
typedef struct {
    uint64_t offset, source, size;
} wc_pack_row;

/* A dim of a tensor: `stride` is in bytes of memory, `step` in elements of the global tensor. */
typedef struct {
    uint64_t count, stride, step;
} wc_words_dim;

/* A matrix of elements of `width` bytes (2: bfloat16, 4: float32) to quantise to fp8; strides, in bytes, are of rows. */
typedef struct {
    uint64_t source, source_stride, width, target, target_stride, scales, scales_stride;
    uint64_t num_rows, num_columns, block_rows, block_columns;
} wc_matrix;

/* Quantise the blocks of these rows, of which `first` is the first one, and set their scales. */
typedef void wc_quantise_call(const wc_matrix *matrix, uint64_t first);

/* Sums of digests, each modulo 2^64. */
typedef struct {
    _Atomic uint64_t low, high;
} wc_sums;

/* Positions ascend. A difference is that of two words as signed integers, which has one bit more than a word. */
typedef struct {
    uint32_t *positions;
    int64_t *differences;
    size_t count;
} wc_changes;

/* `count` words of a payload from `first` on, which are those of a tensor from `position` on, and their digest. */
typedef struct {
    uint64_t first, count, position;
    wc_sums sums;
} wc_piece_row;

/* Append the words of a chunk that differ to `changes`, which have room; with `advance`, store them in the base. */
typedef void wc_detect_call(uint8_t *base, const uint8_t *words, size_t num_words, size_t width, int advance,
                            wc_changes *changes);

/* Classes of a chunk's base: a word is in the first class whose bound is above its key. The last class has no bound. */
typedef struct {
    size_t count;
    uint8_t bounds[WC_MAX_CLASSES - 1]; /* ascending; a key is the bits after the sign bit, at most eight */
} wc_classes;

/* Append each change to the changes of its class; its position there is the number of that class's words before it. */
typedef void wc_rank_call(const wc_classes *classes, const uint8_t *base, size_t num_words, size_t width,
                          const wc_changes *changes, wc_changes *ranked);
/* The inverse: append the changes of all classes to `changes`. Returns 1 if a class has fewer words than a position. */
typedef int wc_unrank_call(const wc_classes *classes, const uint8_t *base, size_t num_words, size_t width,
                           const wc_changes *ranked, wc_changes *changes);

/* Functions for one instruction set. `wc_plain` works on every CPU. */
typedef struct {
    const char *name;
    /* Copy bytes. With `stream` the stores bypass the caches, for targets that are not read again soon, and need a
       `wc_fence` at the end. */
    void (*move)(uint8_t *target, const uint8_t *source, size_t size, int stream);
    /* Compute the lanes of one chunk; also copy it if `target` is not NULL. */
    void (*lanes)(uint8_t *target, const uint8_t *source, int stream, uint64_t lanes[2]);
    /* Compute the lanes of a tensor's words of 1, 2 or 4 bytes, all in one block, from its word `column` on. */
    void (*weigh)(const uint8_t *words, size_t width, size_t column, size_t count, uint64_t lanes[2]);
    wc_detect_call *detect;
    wc_rank_call *rank;
    wc_unrank_call *unrank;
    wc_quantise_call *quantise;
} wc_vectors;

extern const wc_vectors wc_plain;
extern const wc_vectors *wc_native; /* the fastest ones for this CPU; set by wc_begin */
extern uint64_t wc_keys[2][WC_CHUNK_WORDS];

void wc_begin(void); /* to be called once, before anything else */
void wc_fence(void); /* make all streaming stores of this thread visible to others */
uint64_t wc_mixed(uint64_t value); /* splitmix64: its increment, then its output function */

/* Return what a word of a chunk adds to one of the chunk's lanes, by its key in that lane. */
static inline uint64_t wc_product(uint64_t word, uint64_t key) {
    uint32_t low = (uint32_t)word + (uint32_t)key, high = (uint32_t)(word >> 32) + (uint32_t)(key >> 32);
    return (uint64_t)low * high;
}

/* Call `work` for all numbers below `count`, `grain` per call, in at most `threads` threads, including this one. All
   threads have ended when it returns. If a thread can't be made, the others do its work. */
void wc_parallel(void (*work)(void *context, size_t first, size_t last), void *context, size_t count, size_t grain,
                 int threads);

/* Return the first invalid row of a table of copies of either kind, or `count`; `bytes` is the size of all. */
size_t wc_bad_copy(const uint64_t *rows, size_t count, size_t row_words, uint64_t *bytes);
void wc_copy(const wc_vectors *by, const wc_copy_row *rows, size_t count, int stream, int threads);
void wc_copy_strided(const wc_vectors *by, const wc_strided_row *rows, size_t count, int stream, int threads);

/* Add the digests of a payload's chunks from `first` to `last` to `sums`; chunk 0 also adds the payload's length. */
void wc_digest(const wc_vectors *by, const uint8_t *payload, uint64_t size, uint64_t first, uint64_t last,
               wc_sums *sums, int threads);
/* Compute the two lanes of each chunk of a payload, and add the digest of a payload of `size` bytes from its lanes. */
void wc_lanes(const wc_vectors *by, const uint8_t *payload, uint64_t size, uint64_t *lanes, int threads);
void wc_digest_lanes(const uint64_t *lanes, uint64_t size, wc_sums *sums);
/* Return the first row that overlaps the row before or reaches outside of the payload, or `count`. */
size_t wc_bad_pack(const wc_pack_row *rows, size_t count, uint64_t size);
/* Fill a payload by rows, which are in order and don't overlap; add the chunks that they cover completely to `sums`. */
void wc_copy_and_digest(const wc_vectors *by, uint8_t *payload, uint64_t size, const wc_pack_row *rows, size_t count,
                        wc_sums *sums, int stream, int threads);

/* Return 1 unless these can be elements of 1, 2, 4, 8 or 16 bytes in memory; `bytes` is the size of all. */
int wc_bad_words(uint64_t address, uint64_t itemsize, const wc_words_dim *dims, size_t count, uint64_t *bytes);
/* Add the digest of a tensor's elements to `sums`; `first` is the number of its first element in the global tensor. */
void wc_digest_words(const wc_vectors *by, uint64_t address, size_t itemsize, uint64_t first, const wc_words_dim *dims,
                     size_t count, wc_sums *sums, int threads);
/* Let the digests of pieces, in order, follow changes of the payload, whose positions count from its word `start`. */
void wc_digest_changes(wc_piece_row *pieces, size_t count, uint64_t start, const wc_changes *changes);
void wc_begin_words(void);
/* Quantise a matrix by blocks, of which those at the edges are smaller. */
void wc_quantise(const wc_vectors *by, const wc_matrix *matrix, int threads);
wc_quantise_call wc_quantise_plain, wc_quantise_avx2;
wc_detect_call wc_detect_plain, wc_detect_avx2;
wc_rank_call wc_rank_plain, wc_rank_avx2;
wc_unrank_call wc_unrank_plain, wc_unrank_avx2;
void wc_weigh_plain(const uint8_t *words, size_t width, size_t column, size_t count, uint64_t lanes[2]);
void wc_weigh_avx2(const uint8_t *words, size_t width, size_t column, size_t count, uint64_t lanes[2]);

/* Have the kernel populate these pages. Returns 0, or errno: EINVAL if the kernel does not support that. */
int wc_populate(uint64_t address, uint64_t size);

#endif
