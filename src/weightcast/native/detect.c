/* Finds the words in which two payloads differ; runs at the speed of memory if few do. */
#include "blocks.h"
#include "delta.h"

#define STRETCH 4096 /* bytes of each payload: they are still in the first cache when the differences are taken */

/* Add the positions of a block's changes. The first few are written whether they are there or not: how many a block
   has can't be predicted, and a mispredicted branch takes longer. The CPU's own prefetching is enough here. */
WC_INLINE size_t add_positions(uint64_t mask, size_t first, uint32_t *positions, size_t count) {
    size_t end = count + (size_t)__builtin_popcountll(mask);
    for (size_t i = 0; i < WC_DETECT_SLACK; i++, mask &= mask - 1)
        positions[count + i] = (uint32_t)(first + (size_t)__builtin_ctzll(mask | (uint64_t)1 << 63));
    for (count += WC_DETECT_SLACK; mask; mask &= mask - 1)
        positions[count++] = (uint32_t)(first + (size_t)__builtin_ctzll(mask));
    return end;
}

WC_INLINE void find(uint8_t *base, const uint8_t *words, size_t num_words, size_t width, int advance,
                    wc_changes *changes, wc_differing *differing) {
    size_t size = num_words * width, whole = size - size % WC_BLOCK_BYTES, count = changes->count;
    uint32_t *positions = changes->positions;
    int64_t *differences = changes->differences;
    uint8_t last[2][WC_BLOCK_BYTES] = {{0}, {0}};
    memcpy(last[0], base + whole, size - whole);
    memcpy(last[1], words + whole, size - whole);
    for (size_t start = 0; start < size; start += STRETCH) {
        size_t end = size - start < STRETCH ? size : start + STRETCH, i = count;
        for (size_t at = start; at < end; at += WC_BLOCK_BYTES) {
            const uint8_t *former = at < whole ? base + at : last[0], *now = at < whole ? words + at : last[1];
            count = add_positions(differing(former, now, width), at / width, positions, count);
        }
        for (; i < count; i++) {
            uint8_t *former = base + positions[i] * width;
            const uint8_t *now = words + positions[i] * width;
            differences[i] = wc_signed_word(now, width) - wc_signed_word(former, width);
            if (advance)
                memcpy(former, now, width);
        }
    }
    changes->count = count;
}

#define DETECT(NAME, DIFFERING)                                                                                        \
    void NAME(uint8_t *base, const uint8_t *words, size_t num_words, size_t width, int advance,                        \
              wc_changes *changes) {                                                                                   \
        if (width == 1)                                                                                                \
            find(base, words, num_words, 1, advance, changes, DIFFERING);                                              \
        else if (width == 2)                                                                                           \
            find(base, words, num_words, 2, advance, changes, DIFFERING);                                              \
        else                                                                                                           \
            find(base, words, num_words, 4, advance, changes, DIFFERING);                                              \
    }
DETECT(wc_detect_plain, wc_differing_plain)
#if defined(__x86_64__)
WC_AVX2 DETECT(wc_detect_avx2, wc_differing_avx2)
#endif
