/* Adds changes to memory or subtracts them. */
#include "blocks.h"
#include "delta.h"

enum { GRAIN = 1 << 14, AHEAD = 16 }; /* changes */

typedef struct {
    uint8_t *words;
    const wc_strided_row *rows;
    size_t width;
    const wc_changes *changes;
    int subtract;
} applying;

size_t wc_bad_change(const wc_changes *changes, uint64_t num_words) {
    for (size_t i = 0; i < changes->count; i++)
        if (changes->positions[i] >= num_words || (i && changes->positions[i] <= changes->positions[i - 1]))
            return i;
    return changes->count;
}

WC_INLINE void add(uint8_t *at, size_t width, int64_t difference) {
    uint32_t sum = wc_word(at, width) + (uint32_t)difference;
    memcpy(at, &sum, width); /* the lowest bytes, on a little-endian machine */
}

WC_INLINE void add_all(const applying *all, size_t first, size_t last, size_t width) {
    const uint32_t *positions = all->changes->positions;
    const int64_t *differences = all->changes->differences;
    uint8_t *words = all->words;
    int64_t sign = all->subtract ? -1 : 1;
    for (size_t i = first; i < last; i++) {
        __builtin_prefetch(words + positions[i + AHEAD < last ? i + AHEAD : i] * width, 1);
        add(words + positions[i] * width, width, sign * differences[i]);
    }
}

static void apply_changes(void *context, size_t first, size_t last) {
    const applying *all = context;
    if (all->width == 1)
        add_all(all, first, last, 1);
    else if (all->width == 2)
        add_all(all, first, last, 2);
    else
        add_all(all, first, last, 4);
}

void wc_apply(uint8_t *words, size_t width, const wc_changes *changes, int subtract, int threads) {
    applying all = {.words = words, .width = width, .changes = changes, .subtract = subtract};
    wc_parallel(apply_changes, &all, changes->count, GRAIN, threads);
}
