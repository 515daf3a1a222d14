/* Writes bits into bytes and reads them back, the lowest bit first. */
#ifndef WEIGHTCAST_BITS_H
#define WEIGHTCAST_BITS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    uint8_t *to;
    uint64_t bits;
    unsigned count;
} wc_writer;

/* Write `count` bits, at most 56; the bits above must be zero. */
static inline void wc_put(wc_writer *writer, uint64_t bits, unsigned count) {
    writer->bits |= bits << writer->count;
    writer->count += count;
    memcpy(writer->to, &writer->bits, 8);
    writer->to += writer->count >> 3;
    writer->bits >>= writer->count & ~7u;
    writer->count &= 7;
}

static inline uint8_t *wc_end(wc_writer *writer) { return writer->to + (writer->count != 0); }

/* `bit` may pass `end`, where zeros are read: the caller compares the two. */
typedef struct {
    const uint8_t *from;
    uint64_t bit, end;
} wc_reader;

/* Return the next bits, at least 57. */
static inline uint64_t wc_peek(const wc_reader *reader) {
    uint64_t at = reader->bit >> 3, size = reader->end >> 3, bits = 0;
    if (__builtin_expect(at + 8 <= size, 1))
        memcpy(&bits, reader->from + at, 8);
    else if (at < size)
        memcpy(&bits, reader->from + at, size - at);
    return bits >> (reader->bit & 7);
}

static inline uint64_t wc_low_bits(uint64_t bits, unsigned count) { return bits & (((uint64_t)1 << count) - 1); }

#endif
