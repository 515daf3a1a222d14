/* Weights as float8_e4m3fn with a float32 scale for each block, with the bits of torch (sources/fp8_blocks). */
#include "blocks.h"

#define LARGEST 448.0f
#define SMALLEST 1e-4f /* what the largest value of a block counts as at least */

typedef struct {
    const wc_vectors *by;
    const wc_matrix *matrix;
} quantising;

WC_INLINE uint32_t bits_at(const uint8_t *at, size_t width) {
    return width == 2 ? wc_word(at, 2) << 16 : wc_word(at, 4); /* bfloat16 is the upper half of a float32 */
}

WC_INLINE float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

WC_INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* Return the largest size of a value, as the bits of a float32: NaN is larger than infinity. */
typedef uint32_t wc_largest(const uint8_t *row, size_t count, size_t width);

WC_INLINE uint32_t largest_plain(const uint8_t *row, size_t count, size_t width) {
    uint32_t found = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = bits_at(row + i * width, width) & 0x7FFFFFFF;
        found = bits > found ? bits : found;
    }
    return found;
}

#define NORMAL_BITS 0x3C800000 /* the smallest normal e4m3, 2^-6 */
#define RAISE 16384.0f /* added to a smaller one, it leaves the steps of the subnormal ones, 2^-9 */
#define RAISE_BITS 0x46800000
#define REBIAS 0xC407FFFFu /* an exponent biased by 7 instead of 127, and almost a half for the rounding */

/* Round values times `factor` to the nearest e4m3, ties to even. Products are at most a little above 448. */
typedef void wc_convert(uint8_t *target, const uint8_t *row, size_t count, size_t width, float factor);

WC_INLINE void convert_plain(uint8_t *target, const uint8_t *row, size_t count, size_t width, float factor) {
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = as_bits(as_float(bits_at(row + i * width, width)) * factor), sign = bits & 0x80000000u;
        bits ^= sign;
        uint32_t subnormal = as_bits(as_float(bits) + RAISE) - RAISE_BITS;
        uint32_t normal = (bits + REBIAS + (bits >> 20 & 1)) >> 20;
        target[i] = (uint8_t)((bits < NORMAL_BITS ? subnormal : normal) | sign >> 24);
    }
}

static uint64_t part(uint64_t first, uint64_t of_block, uint64_t size) {
    return size - first < of_block ? size - first : of_block;
}

/* Row by row over the whole width, as memory likes it; the largest sizes are kept in the place of the scales. */
WC_INLINE void quantise(const wc_matrix *m, uint64_t first, size_t width, wc_largest *largest, wc_convert *convert) {
    const uint8_t *source = (const uint8_t *)(uintptr_t)m->source + first * m->source_stride;
    uint8_t *target = (uint8_t *)(uintptr_t)m->target + first * m->target_stride;
    float *scales = (float *)(uintptr_t)(m->scales + first / m->block_rows * m->scales_stride);
    uint64_t rows = part(first, m->block_rows, m->num_rows), columns = m->num_columns, step = m->block_columns;
    for (uint64_t row = 0; row < rows; row++)
        for (uint64_t column = 0, across = 0; column < columns; column += step, across++) {
            const uint8_t *at = source + row * m->source_stride + column * width;
            uint32_t found = largest(at, part(column, step, columns), width);
            if (!row || found > as_bits(scales[across]))
                scales[across] = as_float(found);
        }
    for (uint64_t column = 0, across = 0; column < columns; column += step, across++)
        scales[across] = (scales[across] < SMALLEST ? SMALLEST : scales[across]) / LARGEST;
    for (uint64_t row = 0; row < rows; row++)
        for (uint64_t column = 0, across = 0; column < columns; column += step, across++)
            convert(target + row * m->target_stride + column, source + row * m->source_stride + column * width,
                    part(column, step, columns), width, 1.0f / scales[across]);
}

#define QUANTISE(NAME, LARGEST_OF, CONVERT)                                                                            \
    void NAME(const wc_matrix *matrix, uint64_t first) {                                                               \
        if (matrix->width == 2)                                                                                        \
            quantise(matrix, first, 2, LARGEST_OF, CONVERT);                                                           \
        else                                                                                                           \
            quantise(matrix, first, 4, LARGEST_OF, CONVERT);                                                           \
    }
QUANTISE(wc_quantise_plain, largest_plain, convert_plain)
#if defined(__x86_64__)
WC_AVX2 static inline uint32_t largest_avx2(const uint8_t *row, size_t count, size_t width) {
    const __m256i sizes = width == 2 ? _mm256_set1_epi16(INT16_MAX) : _mm256_set1_epi32(INT32_MAX);
    __m256i found = _mm256_setzero_si256();
    size_t i = 0, step = 32 / width;
    for (; i + step <= count; i += step) {
        __m256i each = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(row + i * width)), sizes);
        found = width == 2 ? _mm256_max_epu16(found, each) : _mm256_max_epu32(found, each);
    }
    uint8_t parts[32];
    _mm256_storeu_si256((__m256i *)parts, found);
    uint32_t first = largest_plain(parts, step, width), rest = largest_plain(row + i * width, count - i, width);
    return first > rest ? first : rest;
}

/* Eight at a time. */
WC_AVX2 static inline void convert_avx2(uint8_t *target, const uint8_t *row, size_t count, size_t width, float factor) {
    const __m256i low_bytes = _mm256_set1_epi32(0x0C080400);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m128i *at = (const __m128i *)(row + i * width);
        __m256i words = width == 2 ? _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), 16)
                                   : _mm256_loadu_si256((const __m256i *)at);
        __m256i bits = _mm256_castps_si256(_mm256_mul_ps(_mm256_castsi256_ps(words), _mm256_set1_ps(factor)));
        __m256i sign = _mm256_and_si256(bits, _mm256_set1_epi32(INT32_MIN));
        bits = _mm256_xor_si256(bits, sign);
        __m256 raised = _mm256_add_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(RAISE));
        __m256i subnormal = _mm256_sub_epi32(_mm256_castps_si256(raised), _mm256_set1_epi32(RAISE_BITS));
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), _mm256_set1_epi32(1));
        __m256i normal = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32((int)REBIAS)), odd);
        __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(NORMAL_BITS), bits);
        __m256i bytes = _mm256_blendv_epi8(_mm256_srli_epi32(normal, 20), subnormal, is_small);
        bytes = _mm256_or_si256(bytes, _mm256_srli_epi32(sign, 24));
        bytes = _mm256_shuffle_epi8(bytes, low_bytes);
        uint32_t both[2] = {(uint32_t)_mm256_extract_epi32(bytes, 0), (uint32_t)_mm256_extract_epi32(bytes, 4)};
        memcpy(target + i, both, 8);
    }
    convert_plain(target + i, row + i * width, count - i, width, factor);
}

WC_AVX2 QUANTISE(wc_quantise_avx2, largest_avx2, convert_avx2)
#endif

static void quantise_rows(void *context, size_t first, size_t last) {
    const quantising *all = context;
    for (size_t down = first; down < last; down++)
        all->by->quantise(all->matrix, down * all->matrix->block_rows);
}

void wc_quantise(const wc_vectors *by, const wc_matrix *matrix, int threads) {
    quantising all = {by, matrix};
    uint64_t rows = matrix->num_rows, of_block = matrix->block_rows;
    wc_parallel(quantise_rows, &all, rows / of_block + (rows % of_block != 0), 1, threads);
}
