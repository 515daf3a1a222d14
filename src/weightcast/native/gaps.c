/* The code of changes: gaps and signs, then the magnitudes of those above 1 (native/deltas.py). */
#include "bits.h"
#include "delta.h"

enum {
    ESCAPE = 20,      /* number of zeros that announce a number in plain bits */
    NUMBER_BITS = 20, /* bits of such a number */
    COUNT_BITS = 21,
    PARAMETER_BITS = 5,
    PARAMETERS = 3, /* parameters that are tried, around the one for the mean */
    HEADER_BYTES = 8,
    LENGTHS = 33, /* possible bit lengths of a number of 32 bits */
};

static inline unsigned bit_length(uint64_t number) { return number ? 64 - (unsigned)__builtin_clzll(number) : 0; }

static inline uint64_t magnitude(int64_t difference) {
    return difference < 0 ? 0 - (uint64_t)difference : (uint64_t)difference;
}

/* Return the first parameter to try for Rice codes of `count` numbers with this sum. */
static unsigned first_parameter(uint64_t sum, size_t count) {
    unsigned mean = 0;
    while (mean < NUMBER_BITS && sum >> (mean + 1) >= count)
        mean++;
    unsigned first = mean ? mean - 1 : 0;
    return first > NUMBER_BITS - PARAMETERS ? NUMBER_BITS - PARAMETERS : first;
}

/* Add the zeros of a number's code for each parameter that is tried; the bits of an escape count as zeros. */
static inline __attribute__((always_inline)) void add_zeros(uint32_t number, unsigned first,
                                                            uint64_t zeros[PARAMETERS]) {
    for (unsigned k = 0; k < PARAMETERS; k++) {
        uint32_t found = number >> (first + k);
        zeros[k] += found < ESCAPE ? found : ESCAPE + NUMBER_BITS - first - k;
    }
}

static unsigned cheapest(const uint64_t zeros[PARAMETERS], unsigned first, size_t count, uint64_t *bits) {
    unsigned best = 0;
    for (unsigned k = 1; k < PARAMETERS; k++)
        if (zeros[k] + k * count < zeros[best] + best * count)
            best = k;
    *bits = zeros[best] + count * (1 + (uint64_t)(first + best));
    return first + best;
}

static unsigned choose_order(const size_t lengths[LENGTHS]) {
    unsigned best = 0;
    uint64_t least = UINT64_MAX;
    for (unsigned order = 0; order < LENGTHS - 1; order++) {
        uint64_t bits = 0;
        for (unsigned length = 0; length < LENGTHS; length++)
            bits += lengths[length] * (1 + order + (length > order ? 2 * (length - order) : 0));
        if (bits < least) {
            least = bits;
            best = order;
        }
    }
    return best;
}

wc_code wc_choose(const wc_changes *changes) {
    wc_code code = {.num_bytes = HEADER_BYTES};
    size_t count = changes->count;
    if (!count)
        return code;
    uint64_t zeros[PARAMETERS] = {0}, bits, run_bits = 0, magnitude_bits = 0;
    size_t lengths[LENGTHS] = {0}, last_large = 0;
    unsigned first = first_parameter(changes->positions[count - 1] + 1 - count, count);
    uint32_t next = 0;
    for (size_t i = 0; i < count; i++) {
        add_zeros(changes->positions[i] - next, first, zeros);
        next = changes->positions[i] + 1;
    }
    code.gap_bits = cheapest(zeros, first, count, &bits);
    for (size_t i = 0; i < count; i++)
        if (magnitude(changes->differences[i]) > 1) {
            lengths[bit_length(magnitude(changes->differences[i]) - 2)]++;
            last_large = i;
            code.num_large++;
        }
    if (code.num_large) {
        uint64_t run_zeros[PARAMETERS] = {0};
        first = first_parameter(last_large + 1 - code.num_large, code.num_large);
        code.order = choose_order(lengths);
        size_t after = 0;
        for (size_t i = 0; i <= last_large; i++)
            if (magnitude(changes->differences[i]) > 1) {
                add_zeros((uint32_t)(i - after), first, run_zeros);
                after = i + 1;
                uint64_t number = magnitude(changes->differences[i]) - 2;
                magnitude_bits += 2 * bit_length((number >> code.order) + 1) - 1 + code.order;
            }
        code.run_bits = cheapest(run_zeros, first, code.num_large, &run_bits);
    }
    code.num_bytes += (bits + count + run_bits + magnitude_bits + 7) / 8;
    return code;
}

/* Write a Rice code, followed by `sign_bits` bits of `sign`. */
static inline __attribute__((always_inline)) void put_number(wc_writer *writer, uint32_t number, unsigned parameter,
                                                             unsigned sign_bits, uint64_t sign) {
    uint32_t zeros = number >> parameter;
    if (__builtin_expect(zeros < ESCAPE, 1))
        wc_put(writer,
               (uint64_t)1 << zeros | (wc_low_bits(number, parameter) | sign << parameter) << (zeros + 1),
               zeros + 1 + parameter + sign_bits);
    else
        wc_put(writer, (uint64_t)1 << ESCAPE | (number | sign << NUMBER_BITS) << (ESCAPE + 1),
               ESCAPE + 1 + NUMBER_BITS + sign_bits);
}

uint8_t *wc_write(const wc_code *code, const wc_changes *changes, uint8_t *to) {
    uint64_t header = changes->count | (uint64_t)code->num_large << COUNT_BITS |
                      (uint64_t)(code->gap_bits | code->run_bits << PARAMETER_BITS | code->order << 2 * PARAMETER_BITS)
                          << 2 * COUNT_BITS;
    memcpy(to, &header, HEADER_BYTES);
    wc_writer writer = {to + HEADER_BYTES, 0, 0};
    uint32_t next = 0;
    for (size_t i = 0; i < changes->count; i++) {
        put_number(&writer, changes->positions[i] - next, code->gap_bits, 1, changes->differences[i] < 0);
        next = changes->positions[i] + 1;
    }
    size_t after = 0, left = code->num_large;
    for (size_t i = 0; left; i++) {
        uint64_t number = magnitude(changes->differences[i]);
        if (number < 2)
            continue;
        put_number(&writer, (uint32_t)(i - after), code->run_bits, 0, 0);
        after = i + 1;
        left--;
        number -= 2;
        uint64_t upper = (number >> code->order) + 1;
        unsigned length = bit_length(upper) - 1;
        wc_put(&writer, (uint64_t)1 << length, length + 1);
        wc_put(&writer, wc_low_bits(upper, length), length);
        wc_put(&writer, wc_low_bits(number, code->order), code->order);
    }
    return wc_end(&writer);
}

/* Read a number; `behind` has the bits after it. Returns UINT32_MAX if the code is invalid. */
static inline __attribute__((always_inline)) uint32_t get_number(wc_reader *reader, unsigned parameter,
                                                                 uint64_t *behind) {
    uint64_t bits = wc_peek(reader);
    unsigned zeros = (unsigned)__builtin_ctzll(bits | (uint64_t)1 << ESCAPE);
    if (__builtin_expect(zeros < ESCAPE, 1)) {
        bits >>= zeros + 1;
        reader->bit += zeros + 1 + parameter;
        *behind = bits >> parameter;
        return zeros << parameter | (uint32_t)wc_low_bits(bits, parameter);
    }
    reader->bit += ESCAPE + 1 + NUMBER_BITS;
    *behind = bits >> (ESCAPE + 1 + NUMBER_BITS);
    return bits >> ESCAPE & 1 ? (uint32_t)wc_low_bits(bits >> (ESCAPE + 1), NUMBER_BITS) : UINT32_MAX;
}

static int read_large(wc_reader *reader, size_t num_large, unsigned run_bits, unsigned order, size_t width,
                      int64_t *differences, size_t count) {
    uint64_t at = 0, most = ((uint64_t)1 << (8 * width)) - 1;
    for (size_t i = 0; i < num_large; i++) {
        uint64_t behind;
        at += get_number(reader, run_bits, &behind);
        uint64_t bits = wc_peek(reader);
        unsigned length = (unsigned)__builtin_ctzll(bits | (uint64_t)1 << LENGTHS);
        if (at >= count || length >= LENGTHS)
            return 1;
        reader->bit += length + 1;
        uint64_t upper = (uint64_t)1 << length | wc_low_bits(wc_peek(reader), length);
        reader->bit += length;
        uint64_t number = ((upper - 1) << order | wc_low_bits(wc_peek(reader), order)) + 2;
        reader->bit += order;
        if (number > most || reader->bit > reader->end)
            return 1;
        differences[at] = differences[at] < 0 ? -(int64_t)number : (int64_t)number;
        at++;
    }
    return 0;
}

const uint8_t *wc_read(const uint8_t *from, const uint8_t *end, size_t num_words, size_t width, size_t room,
                       wc_changes *changes) {
    uint64_t header;
    if (end - from < HEADER_BYTES)
        return NULL;
    memcpy(&header, from, HEADER_BYTES);
    size_t count = wc_low_bits(header, COUNT_BITS), num_large = wc_low_bits(header >> COUNT_BITS, COUNT_BITS);
    unsigned parameters[3];
    for (unsigned i = 0; i < 3; i++)
        parameters[i] = (unsigned)wc_low_bits(header >> (2 * COUNT_BITS + i * PARAMETER_BITS), PARAMETER_BITS);
    unsigned gap_bits = parameters[0], run_bits = parameters[1], order = parameters[2];
    if (header >> (2 * COUNT_BITS + 3 * PARAMETER_BITS) || count > room || num_large > count ||
        gap_bits >= NUMBER_BITS || run_bits >= NUMBER_BITS || order >= LENGTHS - 1)
        return NULL;
    from += HEADER_BYTES;
    wc_reader reader = {from, 0, 8 * (uint64_t)(end - from)};
    uint32_t *positions = changes->positions + changes->count;
    int64_t *differences = changes->differences + changes->count;
    uint64_t at = 0, sign;
    for (size_t i = 0; i < count; i++) {
        at += get_number(&reader, gap_bits, &sign);
        reader.bit++;
        if (at >= num_words || reader.bit > reader.end)
            return NULL;
        positions[i] = (uint32_t)at++;
        differences[i] = 1 - 2 * (int64_t)(sign & 1);
    }
    if (read_large(&reader, num_large, run_bits, order, width, differences, count))
        return NULL;
    if (reader.bit & 7 && from[reader.bit >> 3] >> (reader.bit & 7))
        return NULL; /* the padding of the last byte must be zeros */
    changes->count += count;
    return from + (reader.bit + 7) / 8;
}
