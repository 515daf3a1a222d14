/* Blocks of 64 bytes, and masks of those of their words that differ or are small: one bit per word, in C and AVX2. */
#ifndef WEIGHTCAST_BLOCKS_H
#define WEIGHTCAST_BLOCKS_H

#include "core.h"

#include <string.h>

#define WC_BLOCK_BYTES 64
#define WC_NUM_BOUNDS (WC_MAX_CLASSES - 1)
#define WC_INLINE static inline __attribute__((always_inline))

typedef uint64_t wc_differing(const uint8_t *a, const uint8_t *b, size_t width);
/* Compute a mask for each bound: the words that are below it when their sign bit is cleared. */
typedef void wc_below(const uint8_t *words, size_t width, const uint32_t bounds[WC_NUM_BOUNDS],
                      uint64_t masks[WC_NUM_BOUNDS]);

WC_INLINE uint32_t wc_word(const uint8_t *at, size_t width) {
    uint16_t two;
    uint32_t four;
    if (width == 1)
        return *at;
    if (width == 2) {
        memcpy(&two, at, 2);
        return two;
    }
    memcpy(&four, at, 4);
    return four;
}

WC_INLINE int64_t wc_signed_word(const uint8_t *at, size_t width) {
    uint32_t word = wc_word(at, width);
    return width == 1 ? (int8_t)word : width == 2 ? (int16_t)word : (int32_t)word;
}

WC_INLINE uint64_t wc_differing_plain(const uint8_t *a, const uint8_t *b, size_t width) {
    uint64_t found = 0;
    for (size_t i = 0; i < WC_BLOCK_BYTES; i += 8) {
        uint64_t x, y;
        memcpy(&x, a + i, 8);
        memcpy(&y, b + i, 8);
        found |= x ^ y;
    }
    if (!found)
        return 0;
    found = 0;
    for (size_t i = 0; i < WC_BLOCK_BYTES / width; i++)
        found |= (uint64_t)(wc_word(a + i * width, width) != wc_word(b + i * width, width)) << i;
    return found;
}

WC_INLINE void wc_below_plain(const uint8_t *words, size_t width, const uint32_t bounds[WC_NUM_BOUNDS],
                              uint64_t masks[WC_NUM_BOUNDS]) {
    uint32_t without_sign = UINT32_MAX >> (33 - 8 * width);
    memset(masks, 0, WC_NUM_BOUNDS * sizeof *masks);
    for (size_t i = 0; i < WC_BLOCK_BYTES / width; i++)
        for (size_t c = 0; c < WC_NUM_BOUNDS; c++)
            masks[c] |= (uint64_t)((wc_word(words + i * width, width) & without_sign) < bounds[c]) << i;
}

#if defined(__x86_64__)
#include <immintrin.h>
#define WC_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt")))

/* Load one of two parts of a block, such that _mm256_packs_epi16 of both has the words in order. */
WC_AVX2 static inline __m256i wc_part_avx2(const uint8_t *words, size_t part, size_t width) {
    if (width != 2)
        return _mm256_loadu_si256((const __m256i *)(words + 32 * part));
    return _mm256_loadu2_m128i((const __m128i *)(words + 16 * part + 32), (const __m128i *)(words + 16 * part));
}

/* Return one bit for each word of a block, from two vectors whose words are all ones or all zeros. */
WC_AVX2 static inline uint64_t wc_mask_avx2(__m256i low, __m256i high, size_t width) {
    if (width == 1)
        return (uint32_t)_mm256_movemask_epi8(low) | (uint64_t)(uint32_t)_mm256_movemask_epi8(high) << 32;
    if (width == 2)
        return (uint32_t)_mm256_movemask_epi8(_mm256_packs_epi16(low, high));
    return (uint64_t)(_mm256_movemask_ps(_mm256_castsi256_ps(low)) |
                      _mm256_movemask_ps(_mm256_castsi256_ps(high)) << 8);
}

WC_AVX2 static inline uint64_t wc_differing_avx2(const uint8_t *a, const uint8_t *b, size_t width) {
    __m256i same[2];
    for (size_t i = 0; i < 2; i++) {
        __m256i x = wc_part_avx2(a, i, width), y = wc_part_avx2(b, i, width);
        same[i] = width == 1   ? _mm256_cmpeq_epi8(x, y)
                  : width == 2 ? _mm256_cmpeq_epi16(x, y)
                               : _mm256_cmpeq_epi32(x, y);
    }
    return wc_mask_avx2(same[0], same[1], width) ^ UINT64_MAX >> (64 - WC_BLOCK_BYTES / width);
}

WC_AVX2 static inline void wc_below_avx2(const uint8_t *words, size_t width, const uint32_t bounds[WC_NUM_BOUNDS],
                                         uint64_t masks[WC_NUM_BOUNDS]) {
    __m256i sign = width == 1   ? _mm256_set1_epi8(0x7F)
                   : width == 2 ? _mm256_set1_epi16(0x7FFF)
                                : _mm256_set1_epi32(0x7FFFFFFF);
    __m256i low = _mm256_and_si256(wc_part_avx2(words, 0, width), sign);
    __m256i high = _mm256_and_si256(wc_part_avx2(words, 1, width), sign);
#pragma GCC unroll 5
    for (size_t c = 0; c < WC_NUM_BOUNDS; c++)
        if (width == 1) {
            __m256i bound = _mm256_set1_epi8((char)bounds[c]);
            masks[c] = wc_mask_avx2(_mm256_cmpgt_epi8(bound, low), _mm256_cmpgt_epi8(bound, high), 1);
        } else if (width == 2) {
            __m256i bound = _mm256_set1_epi16((short)bounds[c]);
            masks[c] = wc_mask_avx2(_mm256_cmpgt_epi16(bound, low), _mm256_cmpgt_epi16(bound, high), 2);
        } else {
            __m256i bound = _mm256_set1_epi32((int)bounds[c]);
            masks[c] = wc_mask_avx2(_mm256_cmpgt_epi32(bound, low), _mm256_cmpgt_epi32(bound, high), 4);
        }
}
#endif

#endif
