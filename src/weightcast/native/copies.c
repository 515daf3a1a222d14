/* Copies by tables of addresses. The caller has checked that all rows are within memory that stays mapped. */
#include "core.h"

#include <string.h>

enum { ROWS = 64, AHEAD = 4 };

typedef struct {
    const wc_vectors *by;
    const void *rows;
    size_t count;
    int stream;
} copies;

size_t wc_bad_copy(const uint64_t *rows, size_t count, size_t row_words, uint64_t *bytes) {
    *bytes = 0;
    for (size_t i = 0; i < count; i++) {
        const uint64_t *row = rows + row_words * i;
        uint64_t size = row[2];
        for (size_t k = WC_COPY_WORDS; k < row_words; k += 3) {
            if (row[k] && size > WC_MAX_BYTES / row[k])
                return i;
            size *= row[k];
        }
        *bytes += size;
        if (size > WC_MAX_BYTES || *bytes > WC_MAX_BYTES || (size && !(row[0] && row[1])))
            return i;
    }
    return count;
}

/* Prefetch the next rows while one is copied: small rows may be anywhere in memory. */
static void fetch(uint64_t target, uint64_t source) {
    __builtin_prefetch((const void *)(uintptr_t)source);
    __builtin_prefetch((const void *)(uintptr_t)target, 1);
}

static void copy_rows(void *context, size_t first, size_t last) {
    copies *all = context;
    const wc_copy_row *rows = all->rows;
    for (size_t i = first; i < last; i++) {
        if (i + AHEAD < last)
            fetch(rows[i + AHEAD].target, rows[i + AHEAD].source);
        all->by->move((uint8_t *)(uintptr_t)rows[i].target, (const uint8_t *)(uintptr_t)rows[i].source, rows[i].size,
                      all->stream);
    }
    wc_fence();
}

/* Rows that a thread takes at a time: few, so that threads end together, but not so few that they contend for the
   counter. */
static size_t grain(size_t count, int threads) {
    size_t share = count / (16 * (size_t)(threads > 0 ? threads : 1));
    return share < 1 ? 1 : share > ROWS ? ROWS : share;
}

void wc_copy(const wc_vectors *by, const wc_copy_row *rows, size_t count, int stream, int threads) {
    copies all = {by, rows, count, stream};
    wc_parallel(copy_rows, &all, count, grain(count, threads), threads);
}

/* Copy the innermost dim of runs. Single elements have their own loops, since calling memcpy would cost more. */
static void copy_runs(const wc_vectors *by, uint8_t *target, const uint8_t *source, const wc_strided_row *row,
                      int stream) {
    uint64_t count = row->dims[WC_MAX_DIMS - 1].count, to = row->dims[WC_MAX_DIMS - 1].target_stride,
             from = row->dims[WC_MAX_DIMS - 1].source_stride;
#define ELEMENTS(SIZE)                                                                                                 \
    case SIZE:                                                                                                         \
        for (uint64_t i = 0; i < count; i++)                                                                           \
            memcpy(target + i * to, source + i * from, SIZE);                                                          \
        return;
    switch (row->run) {
        ELEMENTS(1)
        ELEMENTS(2)
        ELEMENTS(4)
        ELEMENTS(8)
        ELEMENTS(16)
    default:
        for (uint64_t i = 0; i < count; i++)
            by->move(target + i * to, source + i * from, row->run, stream);
    }
#undef ELEMENTS
}

static void copy_strided_rows(void *context, size_t first, size_t last) {
    copies *all = context;
    const wc_strided_row *rows = all->rows;
    for (size_t i = first; i < last; i++) {
        const wc_strided_row *row = &rows[i];
        uint8_t *target = (uint8_t *)(uintptr_t)row->target;
        const uint8_t *source = (const uint8_t *)(uintptr_t)row->source;
        for (uint64_t a = 0; a < row->dims[0].count; a++)
            for (uint64_t b = 0; b < row->dims[1].count; b++)
                copy_runs(all->by, target + a * row->dims[0].target_stride + b * row->dims[1].target_stride,
                          source + a * row->dims[0].source_stride + b * row->dims[1].source_stride, row, all->stream);
    }
    wc_fence();
}

void wc_copy_strided(const wc_vectors *by, const wc_strided_row *rows, size_t count, int stream, int threads) {
    copies all = {by, rows, count, stream};
    wc_parallel(copy_strided_rows, &all, count, grain(count, threads), threads);
}
