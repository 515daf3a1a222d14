/* Adds changes to memory or subtracts them, and computes how they change the digests of tensors. */
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

/* Return the bytes from a row's first source word to the end of its last one. The row must not be empty. */
static uint64_t extent(const wc_strided_row *row) {
    uint64_t bytes = row->run;
    for (size_t d = 0; d < WC_MAX_DIMS; d++)
        bytes += (row->dims[d].count - 1) * row->dims[d].source_stride;
    return bytes;
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

static void scatter_rows(void *context, size_t first, size_t last) {
    const applying *all = context;
    int64_t sign = all->subtract ? -1 : 1;
    for (size_t r = first; r < last; r++) {
        const wc_strided_row *row = &all->rows[r];
        size_t order[WC_MAX_DIMS], dims = sorted_dims(row, order);
        if (is_empty(row))
            continue;
        uint64_t size = extent(row);
        for (size_t i = change_at(all->changes, row->source / all->width); i < all->changes->count; i++) {
            uint64_t offset = all->changes->positions[i] * (uint64_t)all->width - row->source, target = row->target;
            if (offset >= size)
                break;
            int is_in = 1;
            for (size_t d = 0; d < dims; d++) {
                uint64_t step = offset / row->dims[order[d]].source_stride;
                is_in &= step < row->dims[order[d]].count;
                offset -= step * row->dims[order[d]].source_stride;
                target += step * row->dims[order[d]].target_stride;
            }
            if (is_in && offset < row->run)
                add((uint8_t *)(uintptr_t)(target + offset), all->width, sign * all->changes->differences[i]);
        }
    }
}

void wc_scatter(const wc_strided_row *rows, size_t count, size_t width, const wc_changes *changes, int subtract,
                int threads) {
    applying all = {.rows = rows, .width = width, .changes = changes, .subtract = subtract};
    size_t share = count / (16 * (size_t)(threads > 0 ? threads : 1));
    wc_parallel(scatter_rows, &all, count, share ? share : 1, threads);
}

size_t wc_bad_runs(const wc_run_row *rows, size_t count, uint64_t num_words, uint64_t num_tensors) {
    uint64_t end = 0;
    for (size_t i = 0; i < count; i++) {
        if (rows[i].first < end || rows[i].first > num_words || rows[i].count > num_words - rows[i].first ||
            rows[i].tensor >= num_tensors)
            return i;
        end = rows[i].first + rows[i].count;
    }
    return count;
}

typedef struct {
    const wc_run_row *rows;
    size_t count;
    const wc_changes *changes;
    wc_sums *sums;
} weighing;

static void digest_changes(void *context, size_t first, size_t last) {
    const weighing *all = context;
    const uint32_t *positions = all->changes->positions;
    size_t low = 0, high = all->count;
    while (low < high) { /* find the first run that ends after the first change */
        size_t middle = low + (high - low) / 2;
        if (all->rows[middle].first + all->rows[middle].count <= positions[first])
            low = middle + 1;
        else
            high = middle;
    }
    size_t i = first;
    for (const wc_run_row *run = all->rows + low; i < last && run < all->rows + all->count; run++) {
        uint64_t end = run->first + run->count, lanes[2] = {0, 0};
        while (i < last && positions[i] < run->first)
            i++;
        while (i < last && positions[i] < end) {
            /* Sum up the changes within one block first: they share the block's weight. */
            uint64_t block = (run->position + positions[i] - run->first) / WC_DIGEST_BLOCK;
            uint64_t behind = (block + 1) * WC_DIGEST_BLOCK - run->position + run->first, sums[2] = {0, 0};
            behind = behind < end ? behind : end;
            uint64_t start = run->position - run->first - block * WC_DIGEST_BLOCK;
            for (; i < last && positions[i] < behind; i++)
                for (size_t lane = 0; lane < 2; lane++) {
                    const uint64_t *total = &wc_weights_up_to[lane][start + positions[i]];
                    sums[lane] += (total[1] - total[0]) * (uint64_t)all->changes->differences[i];
                }
            for (size_t lane = 0; lane < 2; lane++)
                lanes[lane] += sums[lane] * wc_block_weight(lane, block);
        }
        atomic_fetch_add_explicit(&all->sums[run->tensor].low, lanes[0], memory_order_relaxed);
        atomic_fetch_add_explicit(&all->sums[run->tensor].high, lanes[1], memory_order_relaxed);
    }
}

void wc_digest_changes(const wc_run_row *rows, size_t count, const wc_changes *changes, wc_sums *sums, int threads) {
    weighing all = {rows, count, changes, sums};
    wc_parallel(digest_changes, &all, changes->count, GRAIN, threads);
}
