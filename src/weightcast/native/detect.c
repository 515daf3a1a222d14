/* Finds the words in which two payloads differ; runs at the speed of memory if few do. */
#include "blocks.h"
#include "delta.h"

#define AHEAD 1024 /* bytes; see vectors.c */

WC_INLINE void find(uint8_t *base, const uint8_t *words, size_t num_words, size_t width, int advance,
                    wc_changes *changes, wc_differing *differing) {
    size_t size = num_words * width, whole = size - size % WC_BLOCK_BYTES, count = changes->count;
    uint32_t *positions = changes->positions;
    int64_t *differences = changes->differences;
    uint8_t last[2][WC_BLOCK_BYTES] = {{0}, {0}};
    memcpy(last[0], base + whole, size - whole);
    memcpy(last[1], words + whole, size - whole);
    for (size_t at = 0; at < size; at += WC_BLOCK_BYTES) {
        uint8_t *former = at < whole ? base + at : last[0];
        const uint8_t *now = at < whole ? words + at : last[1];
        __builtin_prefetch(base + at + AHEAD);
        __builtin_prefetch(words + at + AHEAD);
        for (uint64_t mask = differing(former, now, width); mask; mask &= mask - 1) {
            size_t i = (size_t)__builtin_ctzll(mask);
            positions[count] = (uint32_t)(at / width + i);
            differences[count] = wc_signed_word(now + i * width, width) - wc_signed_word(former + i * width, width);
            count++;
            if (advance)
                memcpy(base + at + i * width, now + i * width, width);
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
