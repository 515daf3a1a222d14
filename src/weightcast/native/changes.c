/* Adds changes to a payload, with the digest of its chunks, and writes changed words to where copies bring them. */
#include "blocks.h"
#include "delta.h"

enum { GRAIN = 1 << 14, AHEAD = 128 }; /* changes */

typedef struct {
    uint8_t *payload;
    size_t width;
    const wc_changes *changes;
    uint64_t *lanes;
    uint32_t *former, *words;
} applying;

size_t wc_bad_change(const wc_changes *changes, uint64_t num_words) {
    for (size_t i = 0; i < changes->count; i++)
        if (changes->positions[i] >= num_words || (i && changes->positions[i] <= changes->positions[i - 1]))
            return i;
    return changes->count;
}

/* Let the lanes of a chunk be those with this word at byte `at`, before it is written there: wc_product with one of its
   factors changed. */
WC_INLINE void move_lanes(const applying *all, uint64_t at, size_t width, uint32_t word) {
    uint64_t *lanes = all->lanes + 2 * (at / WC_CHUNK_BYTES), half = at / 4 * 4, key = half % WC_CHUNK_BYTES;
    uint32_t shift = 8 * (at % 4), ones = UINT32_MAX >> (32 - 8 * width) << shift;
    uint32_t before = wc_word(all->payload + half, 4), after = (before & ~ones) | (word << shift & ones);
    uint32_t other = wc_word(all->payload + (half ^ 4), 4);
    for (size_t lane = 0; lane < 2; lane++) {
        const uint8_t *keys = (const uint8_t *)wc_keys[lane];
        uint32_t added = wc_word(keys + key, 4), factor = other + wc_word(keys + (key ^ 4), 4);
        lanes[lane] += ((uint64_t)(after + added) - (before + added)) * factor;
    }
}

WC_INLINE void add_all(const applying *all, size_t first, size_t last, size_t width) {
    const uint32_t *positions = all->changes->positions;
    const int64_t *differences = all->changes->differences;
    size_t count = all->changes->count;
    uint8_t *payload = all->payload;
    for (size_t i = first; i < last; i++) {
        uint8_t *at = payload + positions[i] * (uint64_t)width;
        __builtin_prefetch(payload + positions[i + AHEAD < count ? i + AHEAD : i] * (uint64_t)width, 1);
        uint32_t former = wc_word(at, width), word = former + (uint32_t)differences[i];
        if (all->lanes)
            move_lanes(all, positions[i] * (uint64_t)width, width, word);
        memcpy(at, &word, width); /* the lowest bytes, on a little-endian machine */
        if (all->words) {
            all->former[i] = former;
            all->words[i] = word;
        }
    }
}

/* Return the first change from `i` on that is not in the chunk of the one before: threads share no lanes. */
static size_t chunk_start(const applying *all, size_t i) {
    const uint32_t *positions = all->changes->positions;
    uint64_t words = WC_CHUNK_BYTES / all->width;
    while (i && i < all->changes->count && positions[i] / words == positions[i - 1] / words)
        i++;
    return i;
}

static void apply_changes(void *context, size_t first, size_t last) {
    const applying *all = context;
    first = chunk_start(all, first);
    last = chunk_start(all, last);
    if (all->width == 1)
        add_all(all, first, last, 1);
    else if (all->width == 2)
        add_all(all, first, last, 2);
    else
        add_all(all, first, last, 4);
}

void wc_apply(uint8_t *payload, size_t width, const wc_changes *changes, uint64_t *lanes, uint32_t *former,
              uint32_t *words, int threads) {
    applying all = {payload, width, changes, lanes, former, words};
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
    size_t width;
    const wc_changes *changes;
    const uint32_t *words;
} scattering;

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
            __builtin_prefetch((void *)(uintptr_t)(target + ahead), 1);
            memcpy((void *)(uintptr_t)(target + offset), &all->words[i], width);
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
            memcpy((void *)(uintptr_t)(target + offset), &all->words[i], width);
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

void wc_scatter(const wc_strided_row *rows, size_t count, size_t width, const wc_changes *changes,
                const uint32_t *words, int threads) {
    scattering all = {rows, width, changes, words};
    size_t share = count / (16 * (size_t)(threads > 0 ? threads : 1));
    wc_parallel(scatter_rows, &all, count, share ? share : 1, threads);
}
