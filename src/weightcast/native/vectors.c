/* Copying bytes and multiplying words: in plain C for every CPU, and with AVX2 if the CPU has it.

glibc's memcpy bypasses the caches only for copies larger than a part of the cache size that the CPU reports, and a
virtual machine often reports many times the real size. Here the caller says if a target is not read again soon. */
#include "core.h"

#include <string.h>

uint64_t wc_keys[2][WC_CHUNK_WORDS];
const wc_vectors *wc_native = &wc_plain;

uint64_t wc_mixed(uint64_t z) {
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static void move_plain(uint8_t *target, const uint8_t *source, size_t size, int stream) {
    (void)stream;
    memcpy(target, source, size);
}

static void lanes_plain(uint8_t *target, const uint8_t *source, int stream, uint64_t lanes[2]) {
    (void)stream;
    uint64_t first = 0, second = 0;
    for (size_t i = 0; i < WC_CHUNK_WORDS; i++) {
        uint64_t word;
        memcpy(&word, source + 8 * i, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#error "payloads are little-endian, and so must the machine be"
#endif
        first += wc_product(word, wc_keys[0][i]);
        second += wc_product(word, wc_keys[1][i]);
    }
    if (target)
        memcpy(target, source, WC_CHUNK_BYTES);
    lanes[0] = first;
    lanes[1] = second;
}

const wc_vectors wc_plain = {
    "plain", move_plain, lanes_plain, wc_weigh_plain, wc_detect_plain, wc_rank_plain, wc_unrank_plain,
    wc_quantise_plain,
};

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#define LINE 64
/* Prefetch by software, too: a CPU's own prefetchers request too few lines ahead, and stop at each page. */
#define AHEAD (16 * LINE)
#define FETCH(source) _mm_prefetch((const char *)(source) + AHEAD, _MM_HINT_T0)

void wc_fence(void) { _mm_sfence(); }

AVX2 static void move_avx2(uint8_t *target, const uint8_t *source, size_t size, int stream) {
    size_t head = (size_t)(-(uintptr_t)target & (LINE - 1));
    if (!stream || size < head + 2 * LINE) {
        memcpy(target, source, size);
        return;
    }
    memcpy(target, source, head);
    size_t i = head;
    for (; i + 2 * LINE <= size; i += 2 * LINE) {
        FETCH(source + i);
        FETCH(source + i + LINE);
        __m256i a = _mm256_loadu_si256((const __m256i *)(source + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(source + i + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(source + i + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(source + i + 96));
        _mm256_stream_si256((__m256i *)(target + i), a);
        _mm256_stream_si256((__m256i *)(target + i + 32), b);
        _mm256_stream_si256((__m256i *)(target + i + 64), c);
        _mm256_stream_si256((__m256i *)(target + i + 96), d);
    }
    memcpy(target + i, source + i, size - i);
}

/* How the words of a chunk are stored while they are multiplied. */
enum { NOT, CACHED, STREAMED };

AVX2 static inline __attribute__((always_inline)) __m256i multiplied(__m256i words, const uint64_t *keys) {
    __m256i sums = _mm256_add_epi32(words, _mm256_loadu_si256((const __m256i *)keys));
    return _mm256_mul_epu32(sums, _mm256_srli_epi64(sums, 32));
}

AVX2 static inline __attribute__((always_inline)) void lanes_stored(uint8_t *target, const uint8_t *source, int how,
                                                                    uint64_t lanes[2]) {
    __m256i sums[2][2] = {{_mm256_setzero_si256(), _mm256_setzero_si256()},
                          {_mm256_setzero_si256(), _mm256_setzero_si256()}};
    for (size_t i = 0; i < WC_CHUNK_WORDS; i += 8) {
        FETCH(source + 8 * i);
        for (size_t half = 0; half < 2; half++) {
            size_t at = i + 4 * half;
            __m256i words = _mm256_loadu_si256((const __m256i *)(source + 8 * at));
            if (how == CACHED)
                _mm256_storeu_si256((__m256i *)(target + 8 * at), words);
            if (how == STREAMED)
                _mm256_stream_si256((__m256i *)(target + 8 * at), words);
            for (size_t lane = 0; lane < 2; lane++)
                sums[lane][half] = _mm256_add_epi64(sums[lane][half], multiplied(words, &wc_keys[lane][at]));
        }
    }
    for (size_t lane = 0; lane < 2; lane++) {
        uint64_t parts[4];
        _mm256_storeu_si256((__m256i *)parts, _mm256_add_epi64(sums[lane][0], sums[lane][1]));
        lanes[lane] = parts[0] + parts[1] + parts[2] + parts[3];
    }
}

AVX2 static void lanes_avx2(uint8_t *target, const uint8_t *source, int stream, uint64_t lanes[2]) {
    if (!target)
        lanes_stored(target, source, NOT, lanes);
    else if (stream && !((uintptr_t)target & 31))
        lanes_stored(target, source, STREAMED, lanes);
    else
        lanes_stored(target, source, CACHED, lanes);
}

static const wc_vectors avx2 = {
    "avx2", move_avx2, lanes_avx2, wc_weigh_avx2, wc_detect_avx2, wc_rank_avx2, wc_unrank_avx2,
    wc_quantise_avx2,
};
#else
void wc_fence(void) {}
#endif

void wc_begin(void) {
    static const uint64_t seeds[2] = {0x452821E638D01377u, 0xBE5466CF34E90C6Cu};
    for (size_t lane = 0; lane < 2; lane++)
        for (size_t i = 0; i < WC_CHUNK_WORDS; i++)
            wc_keys[lane][i] = wc_mixed(seeds[lane] + i);
    wc_begin_words();
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
        __builtin_cpu_supports("popcnt"))
        wc_native = &avx2;
#endif
}
