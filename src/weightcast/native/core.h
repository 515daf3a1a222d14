/* The native core: copies, digests and their threads. Addresses in, no ABI of torch; nothing here holds the GIL. */
#ifndef WEIGHTCAST_CORE_H
#define WEIGHTCAST_CORE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define WC_CHUNK_BYTES 2048 /* of the digest nh-128 */
#define WC_CHUNK_WORDS (WC_CHUNK_BYTES / 8)
#define WC_MAX_THREADS 4
#define WC_MAX_DIMS 3 /* of a strided copy, besides its runs */
#define WC_MAX_BYTES ((uint64_t)1 << 47)
#define WC_DIGEST_BLOCK 4096 /* words of a tensor that have one B */
#define WC_MAX_CLASSES 6 /* of a delta */
#define WC_RUN_WORDS 2 /* of a row */
#define WC_COPY_WORDS 3
#define WC_STRIDED_WORDS (3 + 3 * WC_MAX_DIMS)
#define WC_MAX_WORDS_DIMS 64 /* of a tensor's elements */

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

/* Bytes of a payload from `offset` on: copied from `source`; zeros where it is 0; what lies there where it is there. */
typedef struct {
    uint64_t offset, source, size;
} wc_pack_row;

/* A dim of a tensor's elements: from one to the next, so many bytes in memory and elements in the global tensor. */
typedef struct {
    uint64_t count, stride, step;
} wc_words_dim;

/* Digests add up, modulo 2^64 each. */
typedef struct {
    _Atomic uint64_t low, high;
} wc_sums;

/* Positions ascend. A difference is that of two words as signed integers, a number of one bit more. */
typedef struct {
    uint32_t *positions;
    int64_t *differences;
    size_t count;
} wc_changes;

/* Append to `changes`, which have room, the words in which a chunk differs; with `advance`, store them in the base. */
typedef void wc_detect_call(uint8_t *base, const uint8_t *words, size_t num_words, size_t width, int advance,
                            wc_changes *changes);

/* Classes of a chunk's base: a word is in the first one whose bound is above it without its sign. The last has none. */
typedef struct {
    size_t count;
    uint8_t bounds[WC_MAX_CLASSES - 1]; /* ascending, of the key: the bits behind the sign, eight at most */
} wc_classes;

/* Append each change to those of its class, by the number of words of that class before it. */
typedef void wc_rank_call(const wc_classes *classes, const uint8_t *base, size_t num_words, size_t width,
                          const wc_changes *changes, wc_changes *ranked);
/* Append to `changes` those of all classes by ranks. Returns 1 if there is no such word in a class. */
typedef int wc_unrank_call(const wc_classes *classes, const uint8_t *base, size_t num_words, size_t width,
                           const wc_changes *ranked, wc_changes *changes);

/* How bytes are moved. Called on this CPU's kinds of vectors; `wc_plain` is for every CPU. */
typedef struct {
    const char *name;
    /* With `stream`, past the caches: for targets that are not read again soon. `wc_fence` then ends the copies. */
    void (*move)(uint8_t *target, const uint8_t *source, size_t size, int stream);
    /* The lanes of one chunk, which is copied too if `target` is not NULL. */
    void (*lanes)(uint8_t *target, const uint8_t *source, int stream, uint64_t lanes[2]);
    /* The lanes of a tensor's words of 1, 2 or 4 bytes, all in one block of positions, from `column` on. */
    void (*weigh)(const uint8_t *words, size_t width, size_t column, size_t count, uint64_t lanes[2]);
    wc_detect_call *detect;
    wc_rank_call *rank;
    wc_unrank_call *unrank;
} wc_vectors;

extern const wc_vectors wc_plain;
extern const wc_vectors *wc_native; /* the fastest that this CPU has; set by wc_begin */
extern uint64_t wc_keys[2][WC_CHUNK_WORDS];

void wc_begin(void); /* once, before anything else */
void wc_fence(void); /* all streaming stores of this thread are seen by others */
uint64_t wc_mixed(uint64_t value); /* splitmix64: its increment, then its output function */

/* Have `work` done for each number below `count`, `grain` in one call, by at most so many threads, this one among them.
   None is left when it returns. Where a thread can't be made, the others do its work. */
void wc_parallel(void (*work)(void *context, size_t first, size_t last), void *context, size_t count, size_t grain,
                 int threads);

/* The first row of a table of either kind of copies that can't be one, or `count`; and the bytes of all. */
size_t wc_bad_copy(const uint64_t *rows, size_t count, size_t row_words, uint64_t *bytes);
void wc_copy(const wc_vectors *by, const wc_copy_row *rows, size_t count, int stream, int threads);
void wc_copy_strided(const wc_vectors *by, const wc_strided_row *rows, size_t count, int stream, int threads);

/* Add to `sums` what the chunks from `first` to `last` of a payload bring; chunk 0 also brings the payload's length. */
void wc_digest(const wc_vectors *by, const uint8_t *payload, uint64_t size, uint64_t first, uint64_t last,
               wc_sums *sums, int threads);
/* The first row that overlaps the one before or ends outside of the payload, or `count`. */
size_t wc_bad_pack(const wc_pack_row *rows, size_t count, uint64_t size);
/* Fill a payload by rows, which are in order and don't overlap; add to `sums` the chunks that they cover whole. */
void wc_copy_and_digest(const wc_vectors *by, uint8_t *payload, uint64_t size, const wc_pack_row *rows, size_t count,
                        wc_sums *sums, int stream, int threads);

/* Whether these can't be elements of 1, 2, 4, 8 or 16 bytes in memory; and the bytes of all. */
int wc_bad_words(uint64_t address, uint64_t itemsize, const wc_words_dim *dims, size_t count, uint64_t *bytes);
/* Add to `sums` the digest of a tensor's elements; `first` is the number of the first one in the global tensor. */
void wc_digest_words(const wc_vectors *by, uint64_t address, size_t itemsize, uint64_t first, const wc_words_dim *dims,
                     size_t count, wc_sums *sums, int threads);
void wc_begin_words(void);
extern uint64_t wc_weights_up_to[2][WC_DIGEST_BLOCK + 1]; /* the sums of A of the digest of tensors */
uint64_t wc_block_weight(size_t lane, uint64_t block);     /* its B */
wc_detect_call wc_detect_plain, wc_detect_avx2;
wc_rank_call wc_rank_plain, wc_rank_avx2;
wc_unrank_call wc_unrank_plain, wc_unrank_avx2;
void wc_weigh_plain(const uint8_t *words, size_t width, size_t column, size_t count, uint64_t lanes[2]);
void wc_weigh_avx2(const uint8_t *words, size_t width, size_t column, size_t count, uint64_t lanes[2]);

/* Have the kernel back these pages with memory. Returns 0, or errno: EINVAL where the kernel can't. */
int wc_populate(uint64_t address, uint64_t size);

#endif
