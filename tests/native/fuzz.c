/* Random tables through the native core, compared with the plainest way to do the same. For sanitizers: every piece of
   memory has just its size. `fuzz ROUNDS SEED`. */
#include "fuzz.h"

uint64_t state;

static uint64_t address(const void *at) { return (uint64_t)(uintptr_t)at; }

/* Sizes around those of words, lines, vectors and chunks, and some larger ones. */
static uint64_t a_size(void) {
    static const uint64_t edges[] = {0, 1, 8, 31, 32, 63, 64, 127, 128, 191, 2047, 2048, 2049, 4096};
    return drawn(2) ? edges[drawn(sizeof edges / sizeof *edges)] : drawn(drawn(8) ? 6000 : 300000);
}

static const uint64_t seeds[4] = {0x243F6A8885A308D3u, 0x13198A2E03707344u, 0xA4093822299F31D0u, 0x082EFA98EC4E6C89u};

static void copies(void) {
    enum { MOST = 200 };
    static wc_copy_row rows[MOST];
    static uint8_t *targets[MOST], *sources[MOST];
    size_t count = drawn(4) ? drawn(8) : drawn(MOST);
    for (size_t i = 0; i < count; i++) {
        uint64_t size = a_size(), skew = drawn(70), other_skew = drawn(70);
        targets[i] = noise(size + skew);
        sources[i] = noise(size + other_skew);
        rows[i] = (wc_copy_row){address(targets[i] + skew), address(sources[i] + other_skew), size};
    }
    uint64_t bytes;
    REQUIRE(wc_bad_copy((uint64_t *)rows, count, WC_COPY_WORDS, &bytes) == count);
    wc_copy(some_vectors(), rows, count, (int)drawn(2), (int)drawn(6));
    for (size_t i = 0; i < count; i++) {
        REQUIRE(!memcmp((void *)(uintptr_t)rows[i].target, (void *)(uintptr_t)rows[i].source, rows[i].size));
        free(targets[i]);
        free(sources[i]);
    }
}

static void strided_copies(void) {
    uint64_t run = drawn(2) ? (uint64_t)1 << drawn(5) : drawn(300) + 1, sizes[2] = {run, run};
    wc_strided_row row = {.run = run};
    for (int d = WC_MAX_DIMS - 1; d >= 0; d--) {
        row.dims[d].count = drawn(6) + (drawn(8) != 0);
        row.dims[d].target_stride = sizes[0] + drawn(9);
        row.dims[d].source_stride = drawn(4) ? sizes[1] + drawn(9) : 0; /* one row for all */
        uint64_t last = row.dims[d].count ? row.dims[d].count - 1 : 0;
        sizes[0] += last * row.dims[d].target_stride;
        sizes[1] += last * row.dims[d].source_stride;
    }
    uint8_t *target = noise(sizes[0]), *source = noise(sizes[1]), *expected = malloc(sizes[0]);
    REQUIRE(expected);
    memcpy(expected, target, sizes[0]);
    for (uint64_t a = 0; a < row.dims[0].count; a++)
        for (uint64_t b = 0; b < row.dims[1].count; b++)
            for (uint64_t c = 0; c < row.dims[2].count; c++)
                memcpy(expected + a * row.dims[0].target_stride + b * row.dims[1].target_stride +
                           c * row.dims[2].target_stride,
                       source + a * row.dims[0].source_stride + b * row.dims[1].source_stride +
                           c * row.dims[2].source_stride,
                       run);
    row.target = address(target);
    row.source = address(source);
    uint64_t bytes;
    REQUIRE(wc_bad_copy((uint64_t *)&row, 1, WC_STRIDED_WORDS, &bytes) == 1);
    REQUIRE(bytes == run * row.dims[0].count * row.dims[1].count * row.dims[2].count);
    wc_copy_strided(some_vectors(), &row, 1, (int)drawn(2), 2);
    REQUIRE(!memcmp(target, expected, sizes[0]));
    free(target);
    free(source);
    free(expected);
}

/* Rows with gaps between them, which stay as they are; no value becomes NaN. */
static void matrices(void) {
    wc_matrix m = {.width = drawn(2) ? 2 : 4, .num_rows = drawn(40) + 1, .num_columns = drawn(200) + 1};
    m.block_rows = drawn(50) + 1;
    m.block_columns = drawn(150) + 1;
    uint64_t down = (m.num_rows - 1) / m.block_rows + 1, across = (m.num_columns - 1) / m.block_columns + 1;
    m.source_stride = m.num_columns * m.width + drawn(9);
    m.target_stride = m.num_columns + drawn(9);
    m.scales_stride = (across + drawn(3)) * 4;
    uint64_t sizes[3] = {(m.num_rows - 1) * m.source_stride + m.num_columns * m.width,
                         (m.num_rows - 1) * m.target_stride + m.num_columns, (down - 1) * m.scales_stride + across * 4};
    uint8_t *source = noise(sizes[0]), *targets[2] = {noise(sizes[1]), malloc(sizes[1])},
            *scales[2] = {noise(sizes[2]), malloc(sizes[2])};
    REQUIRE(targets[1] && scales[1]);
    for (uint64_t row = 0; row < m.num_rows; row++)
        for (uint64_t i = 0; i < m.num_columns; i++)
            source[row * m.source_stride + (i + 1) * m.width - 1] &= 0xBF; /* neither NaN nor infinity */
    memcpy(targets[1], targets[0], sizes[1]);
    memcpy(scales[1], scales[0], sizes[2]);
    m.source = address(source);
    for (size_t i = 0; i < 2; i++) {
        m.target = address(targets[i]);
        m.scales = address(scales[i]);
        wc_quantise(i ? wc_native : &wc_plain, &m, (int)drawn(4));
    }
    REQUIRE(!memcmp(targets[0], targets[1], sizes[1]) && !memcmp(scales[0], scales[1], sizes[2]));
    for (uint64_t row = 0; row < m.num_rows; row++)
        for (uint64_t i = 0; i < m.num_columns; i++)
            REQUIRE((targets[0][row * m.target_stride + i] & 0x7F) <= 0x7E);
    free(source);
    for (size_t i = 0; i < 2; i++) {
        free(targets[i]);
        free(scales[i]);
    }
}

static void digested(const wc_vectors *by, const uint8_t *payload, uint64_t size, uint64_t first, uint64_t last,
                     int threads, uint64_t out[2]) {
    wc_sums sums;
    atomic_init(&sums.low, out[0]);
    atomic_init(&sums.high, out[1]);
    wc_digest(by, payload, size, first, last, &sums, threads);
    out[0] = atomic_load(&sums.low);
    out[1] = atomic_load(&sums.high);
}

/* Vectors, threads and parts agree; a flipped bit is found. */
static void digests(void) {
    uint64_t size = a_size(), chunks = (size + WC_CHUNK_BYTES - 1) / WC_CHUNK_BYTES, middle = drawn(chunks + 1);
    uint64_t whole[2] = {0, 0}, parts[2] = {0, 0}, damaged[2] = {0, 0};
    uint8_t *payload = noise(size);
    digested(&wc_plain, payload, size, 0, chunks, 1, whole);
    digested(wc_native, payload, size, middle, chunks + drawn(3), (int)drawn(6), parts);
    digested(wc_native, payload, size, 0, middle, (int)drawn(6), parts);
    REQUIRE(!memcmp(whole, parts, sizeof whole));
    if (size) {
        payload[drawn(size)] ^= (uint8_t)(1 << drawn(8));
        digested(some_vectors(), payload, size, 0, chunks, 1, damaged);
        REQUIRE(memcmp(whole, damaged, sizeof whole));
    }
    free(payload);
}

/* Rows in order, with zeros, bytes that are there, and holes between them that are others'. */
static void packs(void) {
    enum { MOST = 400 };
    static wc_pack_row rows[MOST];
    static uint8_t *sources[MOST];
    size_t count = 0;
    uint64_t size = 0, small = drawn(2);
    while (count < MOST && drawn(12)) {
        uint64_t bytes = small ? drawn(700) : a_size();
        if (!drawn(6))
            size += drawn(3000);
        sources[count] = NULL;
        rows[count] = (wc_pack_row){size, drawn(3) ? 0 : 1, bytes};
        if (drawn(3)) {
            uint64_t skew = drawn(9);
            sources[count] = noise(bytes + skew);
            rows[count].source = address(sources[count] + skew);
        }
        size += bytes;
        count++;
    }
    size += drawn(4) ? 0 : drawn(3000);
    uint8_t *payload = noise(size), *expected = malloc(size ? size : 1), *covered = calloc(size ? size : 1, 1);
    REQUIRE(expected && covered);
    memcpy(expected, payload, size);
    for (size_t i = 0; i < count; i++) {
        if (rows[i].source == 1)
            rows[i].source = address(payload + rows[i].offset);
        else if (rows[i].source)
            memcpy(expected + rows[i].offset, (void *)(uintptr_t)rows[i].source, rows[i].size);
        else
            memset(expected + rows[i].offset, 0, rows[i].size);
        memset(covered + rows[i].offset, 1, rows[i].size);
    }
    REQUIRE(wc_bad_pack(rows, count, size) == count);
    wc_sums sums;
    atomic_init(&sums.low, 0);
    atomic_init(&sums.high, 0);
    wc_copy_and_digest(some_vectors(), payload, size, rows, count, &sums, (int)drawn(2), (int)drawn(6));
    REQUIRE(!size || !memcmp(payload, expected, size));
    uint64_t found[2] = {0, 0};
    for (uint64_t chunk = 0; chunk * WC_CHUNK_BYTES < size; chunk++) {
        uint64_t start = chunk * WC_CHUNK_BYTES, end = size - start < WC_CHUNK_BYTES ? size : start + WC_CHUNK_BYTES;
        if (!memchr(covered + start, 0, end - start))
            digested(&wc_plain, expected, size, chunk, chunk + 1, 1, found);
    }
    REQUIRE(found[0] == atomic_load(&sums.low) && found[1] == atomic_load(&sums.high));
    for (size_t i = 0; i < count; i++)
        free(sources[i]);
    free(payload);
    free(expected);
    free(covered);
}

/* Elements in any order of memory, with gaps and repeats, at any positions, against one after the other. */
static void words(void) {
    uint64_t itemsize = (uint64_t)1 << drawn(5), width = itemsize < 4 ? itemsize : 4, size = itemsize, step = 1;
    uint64_t first = drawn(2) ? drawn(10000) : ((uint64_t)1 << 40) + drawn(1 << 20);
    wc_words_dim dims[4];
    size_t count = drawn(5), order[4] = {0, 1, 2, 3}, most = count < 3 && !drawn(4) ? 60 : 6;
    for (size_t d = count; d-- > 0;) {
        dims[d].count = drawn(most) + 1;
        if (d + 1 == count && !drawn(3))
            dims[d].count = drawn(count < 3 ? 5000 : 500) + 1;
        dims[d].step = step + (d + 1 < count && drawn(2) ? drawn(5000) : 0);
        step = dims[d].count * dims[d].step;
    }
    for (size_t d = drawn(2) ? count : 0; d > 1; d--) {
        size_t other = drawn(d), former = order[d - 1];
        order[d - 1] = order[other];
        order[other] = former;
    }
    for (size_t k = count; k-- > 0;) {
        wc_words_dim *dim = &dims[order[k]];
        dim->stride = drawn(6) ? size + (drawn(3) ? 0 : itemsize * drawn(4)) : 0;
        size += (dim->count - 1) * dim->stride;
    }
    uint8_t *memory = noise(size);
    uint64_t expected[2] = {0, 0}, elements = 1, bytes;
    for (size_t d = 0; d < count; d++)
        elements *= dims[d].count;
    for (uint64_t number = 0; number < elements; number++) {
        uint64_t rest = number, at = 0, element = first;
        for (size_t d = count; d-- > 0; rest /= dims[d].count) {
            at += rest % dims[d].count * dims[d].stride;
            element += rest % dims[d].count * dims[d].step;
        }
        for (uint64_t j = 0; j < itemsize / width; j++) {
            uint64_t position = itemsize / width * element + j, word = 0;
            memcpy(&word, memory + at + width * j, width);
            uint64_t sign = word >> (8 * width - 1) & 1;
            word = word - (sign << (8 * width - 1) << 1) + ((uint64_t)1 << 32) + 1;
            for (size_t lane = 0; lane < 2; lane++)
                expected[lane] += (wc_mixed(seeds[lane] + position % 4096) | 1) *
                                  (wc_mixed(seeds[2 + lane] + position / 4096) | 1) * word;
        }
    }
    REQUIRE(!wc_bad_words(address(memory), itemsize, dims, count, &bytes) && bytes == elements * itemsize);
    wc_sums sums;
    atomic_init(&sums.low, 0);
    atomic_init(&sums.high, 0);
    wc_digest_words(some_vectors(), address(memory), itemsize, first, dims, count, &sums, (int)drawn(6));
    REQUIRE(atomic_load(&sums.low) == expected[0] && atomic_load(&sums.high) == expected[1]);
    free(memory);
}

/* Any numbers as a table: refused, or within the payload. */
static void hostile_tables(void) {
    wc_pack_row rows[4];
    uint64_t size = a_size(), bytes;
    static const uint64_t odd[] = {0, 1, (uint64_t)1 << 47, (uint64_t)1 << 63, UINT64_MAX, UINT64_MAX - 7};
    size_t count = drawn(5);
    uint8_t *payload = noise(size);
    for (size_t i = 0; i < count; i++) {
        uint64_t *words = (uint64_t *)&rows[i];
        for (size_t k = 0; k < 3; k++)
            words[k] = drawn(4) ? drawn(size + 2) : odd[drawn(sizeof odd / sizeof *odd)];
        rows[i].source = 0;
    }
    if (wc_bad_pack(rows, count, size) == count) {
        wc_sums sums;
        atomic_init(&sums.low, 0);
        atomic_init(&sums.high, 0);
        wc_copy_and_digest(some_vectors(), payload, size, rows, count, &sums, 1, 2);
    }
    uint64_t table[2 * WC_STRIDED_WORDS];
    for (size_t k = 0; k < 2 * WC_STRIDED_WORDS; k++)
        table[k] = drawn(2) ? drawn(5) : odd[drawn(sizeof odd / sizeof *odd)];
    if (wc_bad_copy(table, 2, WC_STRIDED_WORDS, &bytes) == 2)
        REQUIRE(bytes <= WC_MAX_BYTES);
    uint64_t itemsize = drawn(4) ? 1 : odd[drawn(sizeof odd / sizeof *odd)], end = itemsize;
    const wc_words_dim *dims = (const wc_words_dim *)table;
    if (!wc_bad_words(address(payload), itemsize, dims, 2, &bytes)) {
        for (size_t d = 0; d < 2; d++)
            end += (dims[d].count - 1) * dims[d].stride;
        REQUIRE(itemsize == 1 && bytes == dims[0].count * dims[1].count);
        REQUIRE(bytes <= WC_MAX_BYTES && end <= WC_MAX_BYTES);
    }
    free(payload);
}

int main(int argc, char **argv) {
    long rounds = argc > 1 ? atol(argv[1]) : 1000;
    state = 88172645463325252u + (argc > 2 ? strtoull(argv[2], NULL, 10) * 0x9E3779B97F4A7C15u : 0);
    wc_begin();
    for (long round = 0; round < rounds; round++) {
        copies();
        strided_copies();
        matrices();
        digests();
        packs();
        words();
        hostile_tables();
        deltas();
        hostile_deltas();
    }
    printf("%ld rounds, by %s\n", rounds, wc_native->name);
    return 0;
}
