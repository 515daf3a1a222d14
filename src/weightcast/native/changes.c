/* Adds changes to a payload or subtracts them, and writes changed words to where copies bring them. */
#include "blocks.h"
#include "delta.h"

enum { GRAIN = 1 << 14, AHEAD = 16 }; /* changes */

typedef struct {
    uint8_t *words;
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

/* Return the first change whose position is not below `position`. */
static size_t change_at(const wc_changes *changes, uint64_t position) {
    size_t low = 0, high = changes->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (changes->positions[middle] < position)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Sort a row's dims from the largest source stride to the smallest, without dims of size 1. Returns their number. */
static size_t sorted_dims(const wc_strided_row *row, size_t order[WC_MAX_DIMS]) {
    size_t count = 0;
    for (size_t d = 0; d < WC_MAX_DIMS; d++) {
        if (row->dims[d].count < 2)
            continue;
        size_t at = count++;
        for (; at && row->dims[order[at - 1]].source_stride < row->dims[d].source_stride; at--)
            order[at] = order[at - 1];
        order[at] = d;
    }
    return count;
}

static int is_empty(const wc_strided_row *row) {
    return !row->run || !row->dims[0].count || !row->dims[1].count || !row->dims[2].count;
}

size_t wc_bad_scatter(const wc_strided_row *rows, size_t count, uint64_t num_words, size_t width) {
    for (size_t i = 0; i < count; i++) {
        const wc_strided_row *row = &rows[i];
        uint64_t size = num_words * width, inner = row->run;
        size_t order[WC_MAX_DIMS];
        if (is_empty(row))
            continue;
        if (!row->target || row->source % width || row->run % width || row->run > size || row->source > size)
            return i;
        /* From the smallest stride: each step of a dim must be at least the extent of the dims inside of it. */
        for (size_t d = sorted_dims(row, order); d-- > 0;) {
            uint64_t stride = row->dims[order[d]].source_stride, steps = row->dims[order[d]].count - 1;
            if (stride % width || stride < inner || steps > (size - inner) / stride)
                return i;
            inner += steps * stride;
        }
        if (inner > size - row->source)
            return i;
    }
    return count;
}

typedef struct {
    const wc_strided_row *rows;
    const uint8_t *payload;
    size_t width;
    const wc_changes *changes;
    int former;
} scattering;

WC_INLINE void scatter_word(const scattering *all, size_t i, uint64_t target, size_t width) {
    uint32_t word = wc_word(all->payload + all->changes->positions[i] * (uint64_t)width, width);
    if (all->former)
        word -= (uint32_t)all->changes->differences[i];
    memcpy((uint8_t *)(uintptr_t)target, &word, width);
}

WC_INLINE void scatter_row(const scattering *all, const wc_strided_row *row, size_t width) {
    const uint32_t *positions = all->changes->positions;
    size_t order[WC_MAX_DIMS], dims = sorted_dims(row, order);
    uint64_t size = row->run;
    for (size_t d = 0; d < WC_MAX_DIMS; d++)
        size += (row->dims[d].count - 1) * row->dims[d].source_stride;
    size_t i = change_at(all->changes, row->source / width), end = change_at(all->changes, (row->source + size) / width);
    for (; i < end; i++) {
        uint64_t offset = positions[i] * (uint64_t)width - row->source, target = row->target;
        if (!dims) {
            uint64_t ahead = positions[i + AHEAD < end ? i + AHEAD : i] * (uint64_t)width - row->source;
            __builtin_prefetch(all->payload + row->source + ahead);
            __builtin_prefetch((void *)(uintptr_t)(target + ahead), 1);
            scatter_word(all, i, target + offset, width);
            continue;
        }
        int is_in = 1;
        for (size_t d = 0; d < dims; d++) {
            uint64_t step = offset / row->dims[order[d]].source_stride;
            is_in &= step < row->dims[order[d]].count;
            offset -= step * row->dims[order[d]].source_stride;
            target += step * row->dims[order[d]].target_stride;
        }
        if (is_in && offset < row->run)
            scatter_word(all, i, target + offset, width);
    }
}

static void scatter_rows(void *context, size_t first, size_t last) {
    const scattering *all = context;
    for (size_t r = first; r < last; r++) {
        if (is_empty(&all->rows[r]))
            continue;
        if (all->width == 1)
            scatter_row(all, &all->rows[r], 1);
        else if (all->width == 2)
            scatter_row(all, &all->rows[r], 2);
        else
            scatter_row(all, &all->rows[r], 4);
    }
}

void wc_scatter(const wc_strided_row *rows, size_t count, const uint8_t *payload, size_t width,
                const wc_changes *changes, int former, int threads) {
    scattering all = {rows, payload, width, changes, former};
    size_t share = count / (16 * (size_t)(threads > 0 ? threads : 1));
    wc_parallel(scatter_rows, &all, count, share ? share : 1, threads);
}
