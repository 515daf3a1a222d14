/* The digest of tensors (weightcast/format/tensor_digest.py) of strided memory: words weighted by their positions.

A word s at position p adds A(p mod 4096) B(p div 4096) (s + 2^32 + 1) to each of two lanes, modulo 2^64. Vector
instructions multiply 32 x 32 bits: both halves of A are multiplied with s as an unsigned number, and the offset between
signed and unsigned, times the sum of A, is added at the end. The upper half is needed modulo 2^32 only. */
#include "core.h"

#include <string.h>

enum {
    BLOCK = WC_DIGEST_BLOCK,
    FETCHED = 128,       /* words that are prefetched at once */
    PIECE = 1 << 16,     /* elements of a run that a thread takes at a time */
    LINE = 64,           /* bytes of a cache line, in which neighbours of a strided element are read, too */
    TILE_ELEMENTS = 512, /* elements of a strided run that are gathered at once, with their neighbours */
};
#define AHEAD 1024 /* bytes; see vectors.c */

static const uint64_t seeds[4] = {0x243F6A8885A308D3u, 0x13198A2E03707344u, 0xA4093822299F31D0u, 0x082EFA98EC4E6C89u};
static uint32_t halves[2][2][BLOCK];         /* of the weights A: by lane, then the lower and the upper half */
static uint64_t weights_up_to[2][BLOCK + 1]; /* prefix sums of the weights A */

void wc_begin_words(void) {
    for (size_t lane = 0; lane < 2; lane++)
        for (size_t i = 0; i < BLOCK; i++) {
            uint64_t weight = wc_mixed(seeds[lane] + i) | 1;
            halves[lane][0][i] = (uint32_t)weight;
            halves[lane][1][i] = (uint32_t)(weight >> 32);
            weights_up_to[lane][i + 1] = weights_up_to[lane][i] + weight;
        }
}

/* Return the weight B of a block. */
static uint64_t block_weight(size_t lane, uint64_t block) { return wc_mixed(seeds[2 + lane] + block) | 1; }

/* Return a signed word plus 2^(8 width - 1), which is not negative. */
static inline __attribute__((always_inline)) uint32_t unsigned_word(const uint8_t *words, size_t i, size_t width) {
    uint16_t two;
    uint32_t four;
    if (width == 1)
        return words[i] ^ 0x80u;
    if (width == 2) {
        memcpy(&two, words + 2 * i, 2);
        return two ^ 0x8000u;
    }
    memcpy(&four, words + 4 * i, 4);
    return four ^ 0x80000000u;
}

static inline __attribute__((always_inline)) void weighed(const uint8_t *words, size_t width, size_t column,
                                                          size_t count, uint64_t lanes[2]) {
    uint64_t low[2] = {0, 0};
    uint32_t high[2] = {0, 0};
    for (size_t first = 0; first < count; first += FETCHED) {
        size_t last = count - first < FETCHED ? count : first + FETCHED;
        for (size_t at = first * width; at < last * width; at += LINE)
            __builtin_prefetch(words + at + AHEAD);
        for (size_t i = first; i < last; i++) {
            uint32_t word = unsigned_word(words, i, width);
            for (size_t lane = 0; lane < 2; lane++) {
                low[lane] += (uint64_t)halves[lane][0][column + i] * word;
                high[lane] += halves[lane][1][column + i] * word;
            }
        }
    }
    for (size_t lane = 0; lane < 2; lane++)
        lanes[lane] = low[lane] + ((uint64_t)high[lane] << 32);
}

/* The compiler vectorises this for each width and instruction set. */
#define WEIGH(NAME)                                                                                                    \
    void NAME(const uint8_t *words, size_t width, size_t column, size_t count, uint64_t lanes[2]) {                    \
        if (width == 1)                                                                                                \
            weighed(words, 1, column, count, lanes);                                                                   \
        else if (width == 2)                                                                                           \
            weighed(words, 2, column, count, lanes);                                                                   \
        else                                                                                                           \
            weighed(words, 4, column, count, lanes);                                                                   \
    }
WEIGH(wc_weigh_plain)
#if defined(__x86_64__)
__attribute__((target("avx2"))) WEIGH(wc_weigh_avx2)
#endif

/* A dim that is split into `parts` parts of `part` elements. */
typedef struct {
    wc_words_dim of;
    uint64_t part, parts;
} cut_dim;

typedef struct {
    const wc_vectors *by;
    const uint8_t *elements;
    size_t itemsize, width;
    uint64_t first; /* number of the first element in the global tensor */
    wc_sums *sums;
    /* First the dim of neighbours in memory, then the run (elements consecutive in the tensor), then all others. */
    cut_dim dims[WC_MAX_WORDS_DIMS + 2];
    int num_dims;
} weighing;

/* Add elements that are consecutive in memory and in the tensor. */
static void add_run(const weighing *all, const uint8_t *words, uint64_t element, uint64_t count, uint64_t sums[2]) {
    uint64_t words_each = all->itemsize / all->width, position = element * words_each, left = count * words_each;
    uint64_t offset = ((uint64_t)1 << 32) + 1 - ((uint64_t)1 << (8 * all->width - 1));
    while (left) {
        uint64_t column = position % BLOCK, block = position / BLOCK, lanes[2];
        uint64_t taken = left < BLOCK - column ? left : BLOCK - column;
        all->by->weigh(words, all->width, column, taken, lanes);
        for (size_t lane = 0; lane < 2; lane++) {
            uint64_t added = offset * (weights_up_to[lane][column + taken] - weights_up_to[lane][column]);
            sums[lane] += (lanes[lane] + added) * block_weight(lane, block);
        }
        words += taken * all->width;
        position += taken;
        left -= taken;
    }
}

/* Gather `counts[0]` runs of `counts[1]` elements, which are interleaved in memory, one after the other into `tile`. */
static void gather(const weighing *all, const uint8_t *from, const uint64_t counts[2], uint8_t *tile) {
    uint64_t side = all->dims[0].of.stride, stride = all->dims[1].of.stride;
#define ELEMENTS(SIZE)                                                                                                 \
    case SIZE:                                                                                                         \
        for (uint64_t i = 0; i < counts[1]; i++)                                                                       \
            for (uint64_t k = 0; k < counts[0]; k++)                                                                   \
                memcpy(tile + (k * counts[1] + i) * SIZE, from + i * stride + k * side, SIZE);                         \
        return;
    switch (all->itemsize) {
        ELEMENTS(1)
        ELEMENTS(2)
        ELEMENTS(4)
        ELEMENTS(8)
        ELEMENTS(16)
    }
#undef ELEMENTS
}

static void add_parts(void *context, size_t first, size_t last) {
    const weighing *all = context;
    uint64_t sums[2] = {0, 0}, counts[2] = {0, 0};
    uint8_t tile[TILE_ELEMENTS * LINE];
    for (size_t number = first; number < last; number++) {
        const uint8_t *from = all->elements;
        uint64_t element = all->first, rest = number;
        for (int d = 0; d < all->num_dims; d++) {
            const cut_dim *dim = &all->dims[d];
            uint64_t start = 0;
            if (dim->parts > 1) { /* since a division takes as long as several words */
                start = rest % dim->parts * dim->part;
                rest /= dim->parts;
            }
            from += start * dim->of.stride;
            element += start * dim->of.step;
            if (d < 2)
                counts[d] = dim->of.count - start < dim->part ? dim->of.count - start : dim->part;
        }
        if (all->dims[1].of.stride == all->itemsize) {
            add_run(all, from, element, counts[1], sums);
            continue;
        }
        gather(all, from, counts, tile);
        for (uint64_t k = 0; k < counts[0]; k++)
            add_run(all, tile + k * counts[1] * all->itemsize, element + k * all->dims[0].of.step, counts[1], sums);
    }
    atomic_fetch_add_explicit(&all->sums->low, sums[0], memory_order_relaxed);
    atomic_fetch_add_explicit(&all->sums->high, sums[1], memory_order_relaxed);
}

void wc_digest_changes(wc_piece_row *pieces, size_t count, uint64_t start, const wc_changes *changes) {
    const uint32_t *positions = changes->positions;
    size_t i = 0;
    for (wc_piece_row *piece = pieces; piece < pieces + count && i < changes->count; piece++) {
        uint64_t sums[2] = {0, 0}, weights[2] = {0, 0}, known = UINT64_MAX;
        while (i < changes->count && start + positions[i] < piece->first)
            i++;
        for (; i < changes->count && start + positions[i] - piece->first < piece->count; i++) {
            uint64_t position = piece->position + (start + positions[i] - piece->first), column = position % BLOCK;
            for (size_t lane = 0; lane < 2 && position / BLOCK != known; lane++)
                weights[lane] = block_weight(lane, position / BLOCK);
            known = position / BLOCK;
            for (size_t lane = 0; lane < 2; lane++)
                sums[lane] += (weights_up_to[lane][column + 1] - weights_up_to[lane][column]) * weights[lane] *
                              (uint64_t)changes->differences[i];
        }
        atomic_fetch_add_explicit(&piece->sums.low, sums[0], memory_order_relaxed);
        atomic_fetch_add_explicit(&piece->sums.high, sums[1], memory_order_relaxed);
    }
}

int wc_bad_words(uint64_t address, uint64_t itemsize, const wc_words_dim *dims, size_t count, uint64_t *bytes) {
    uint64_t end = *bytes = itemsize;
    if (!address || !itemsize || itemsize > 16 || itemsize & (itemsize - 1) || count > WC_MAX_WORDS_DIMS)
        return 1;
    for (size_t d = 0; d < count; d++) {
        uint64_t steps = dims[d].count - 1;
        if (!dims[d].count || dims[d].count > WC_MAX_BYTES / *bytes ||
            (steps && dims[d].stride > (WC_MAX_BYTES - end) / steps))
            return 1;
        *bytes *= dims[d].count;
        end += steps * dims[d].stride;
    }
    return 0;
}

void wc_digest_words(const wc_vectors *by, uint64_t address, size_t itemsize, uint64_t first, const wc_words_dim *dims,
                     size_t count, wc_sums *sums, int threads) {
    weighing all = {.by = by,
                    .elements = (const uint8_t *)(uintptr_t)address,
                    .itemsize = itemsize,
                    .width = itemsize < 4 ? itemsize : 4,
                    .first = first,
                    .sums = sums};
    cut_dim *side = &all.dims[0], *run = &all.dims[1], *last = run;
    run->of = (wc_words_dim){1, itemsize, 1};
    /* From the last dim on, merge a dim into the one after it if it continues that one. */
    for (size_t d = count; d-- > 0;) {
        wc_words_dim dim = dims[d], *behind = &last->of;
        if (dim.count == 1)
            continue;
        if (behind->count == 1 && dim.step == 1)
            *behind = dim;
        else if (dim.stride == behind->count * behind->stride && dim.step == behind->count * behind->step)
            behind->count *= dim.count;
        else
            (++last)->of = dim;
    }
    /* A run with gaps in memory is read together with the runs whose elements are next to its own. */
    int has_gaps = run->of.stride != itemsize;
    side->of = (wc_words_dim){1, has_gaps ? run->of.stride : 0, 0};
    for (cut_dim *each = run + 1; each <= last; each++)
        if (each->of.stride < side->of.stride) {
            wc_words_dim former = side->of;
            side->of = each->of;
            each->of = former;
        }
    uint64_t parts = 1, each_elements = 1;
    for (cut_dim *each = side; each <= last; each++) {
        uint64_t most = each == side ? LINE / itemsize : each > run ? 1 : has_gaps ? TILE_ELEMENTS : PIECE;
        each->part = each->of.count < most ? each->of.count : most;
        each->parts = (each->of.count + most - 1) / most;
        parts *= each->parts;
        each_elements *= each->part;
    }
    all.num_dims = (int)(last - side) + 1;
    wc_parallel(add_parts, &all, parts, each_elements < PIECE ? PIECE / each_elements : 1, threads);
}
