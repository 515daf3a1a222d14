/* Codes by classes: words of the base are classified, and each class has a code of positions among its words alone.

Small weights change more often than large ones, and by more. Classes are ranges of the bits after the sign bit, which
are a float's exponent. Both ends find the class of each word by one scan of the base. */
#include "blocks.h"
#include "delta.h"

enum { KEYS = 256, SAMPLED = 256, SAMPLED_CHANGES = 1 << 11, MOST_GROUPS = 48, HEADER_BITS = 64 };

#define AHEAD 2048 /* bytes; see vectors.c */

/* Return the smallest word, with the sign bit cleared, that has this key. */
WC_INLINE uint32_t bound_of(uint8_t key, size_t width) {
    return width == 1 ? key : (uint32_t)key << (8 * width - 9);
}

WC_INLINE uint8_t key_of(const uint8_t *word, size_t width) {
    return (uint8_t)(width == 1 ? *word & 0x7F : wc_word(word, width) >> (8 * width - 9));
}

/* Return a block of the base, copied to `last` if it is the incomplete last one; `all` has a bit for each word. */
WC_INLINE const uint8_t *block_at(const uint8_t *base, size_t at, size_t size, size_t width, uint8_t *last,
                                  uint64_t *all) {
    size_t left = size - at;
    __builtin_prefetch(base + at + AHEAD);
    if (__builtin_expect(left >= WC_BLOCK_BYTES, 1)) {
        *all = UINT64_MAX >> (64 - WC_BLOCK_BYTES / width);
        return base + at;
    }
    *all = ((uint64_t)1 << left / width) - 1;
    memcpy(last, base + at, left);
    return last;
}

WC_INLINE void bounds_of(const wc_classes *classes, size_t width, uint32_t bounds[WC_NUM_BOUNDS]) {
    for (size_t c = 0; c < WC_NUM_BOUNDS; c++)
        bounds[c] = bound_of(classes->bounds[c], width);
}

WC_INLINE void rank(const wc_classes *classes, const uint8_t *base, size_t num_words, size_t width,
                    const wc_changes *changes, wc_changes *ranked, wc_below *below) {
    /* For each bound the block's words below it, and the number of words below it in former blocks. Index 0 is a bound
       with no word below it, index WC_MAX_CLASSES one with all words below it. */
    uint64_t masks[WC_NUM_BOUNDS + 2] = {0}, all;
    uint32_t bounds[WC_NUM_BOUNDS], before[WC_NUM_BOUNDS + 2] = {0};
    uint8_t last[WC_BLOCK_BYTES] = {0};
    size_t next = 0, each = WC_BLOCK_BYTES / width;
    masks[WC_MAX_CLASSES] = UINT64_MAX;
    bounds_of(classes, width, bounds);
    for (size_t first = 0; next < changes->count; first += each) {
        const uint8_t *block = block_at(base, first * width, num_words * width, width, last, &all);
        below(block, width, bounds, masks + 1);
        before[WC_MAX_CLASSES] = (uint32_t)first;
        for (; next < changes->count && changes->positions[next] < first + each; next++) {
            uint64_t bit = (uint64_t)1 << (changes->positions[next] - first);
            size_t c = 0;
#pragma GCC unroll 5
            for (size_t bound = 1; bound <= WC_NUM_BOUNDS; bound++)
                c += !(masks[bound] & bit);
            wc_changes *to = &ranked[c];
            to->positions[to->count] = before[c + 1] + (uint32_t)__builtin_popcountll(masks[c + 1] & (bit - 1)) -
                                       before[c] - (uint32_t)__builtin_popcountll(masks[c] & (bit - 1));
            to->differences[to->count++] = changes->differences[next];
        }
#pragma GCC unroll 5
        for (size_t bound = 1; bound <= WC_NUM_BOUNDS; bound++)
            before[bound] += (uint32_t)__builtin_popcountll(masks[bound]);
    }
}

WC_INLINE int unrank(const wc_classes *classes, const uint8_t *base, size_t num_words, size_t width,
                     const wc_changes *ranked, wc_changes *changes, wc_below *below) {
    uint32_t bounds[WC_NUM_BOUNDS], before[WC_NUM_BOUNDS + 1] = {0}, wanted[WC_MAX_CLASSES];
    size_t next[WC_MAX_CLASSES] = {0}, left = 0;
    uint8_t last[WC_BLOCK_BYTES] = {0};
    bounds_of(classes, width, bounds);
    for (size_t c = 0; c < WC_MAX_CLASSES; c++) {
        wanted[c] = ranked[c].count ? ranked[c].positions[0] : UINT32_MAX;
        left += ranked[c].count;
    }
    for (size_t at = 0; at < num_words * width && left; at += WC_BLOCK_BYTES) {
        uint64_t masks[WC_MAX_CLASSES], all, found = 0;
        int64_t differences[WC_BLOCK_BYTES];
        const uint8_t *block = block_at(base, at, num_words * width, width, last, &all);
        below(block, width, bounds, masks);
        masks[WC_NUM_BOUNDS] = UINT64_MAX;
        uint32_t after[WC_MAX_CLASSES], is_hit = 0; /* number of words below each bound; the last entry counts all */
#pragma GCC unroll 5
        for (size_t c = 0; c < WC_NUM_BOUNDS; c++)
            after[c] = before[c] + (uint32_t)__builtin_popcountll(masks[c] & all);
        after[WC_NUM_BOUNDS] = (uint32_t)(at / width) + (uint32_t)__builtin_popcountll(all);
        is_hit = wanted[0] < after[0];
#pragma GCC unroll 5
        for (size_t c = 1; c < WC_MAX_CLASSES; c++)
            is_hit |= wanted[c] < after[c] - after[c - 1];
        before[WC_NUM_BOUNDS] = (uint32_t)(at / width);
        for (size_t c = 0; is_hit && c < WC_MAX_CLASSES; c++) {
            uint64_t mask = (c ? masks[c] & ~masks[c - 1] : masks[c]) & all;
            uint32_t here = c ? before[c] - before[c - 1] : before[c], end = c ? after[c] - after[c - 1] : after[c];
            while (wanted[c] < end) {
                for (; here < wanted[c]; here++)
                    mask &= mask - 1;
                differences[__builtin_ctzll(mask)] = ranked[c].differences[next[c]++];
                found |= mask & -mask;
                wanted[c] = next[c] < ranked[c].count ? ranked[c].positions[next[c]] : UINT32_MAX;
            }
        }
        memcpy(before, after, sizeof before);
        for (; found; found &= found - 1, left--) {
            size_t i = (size_t)__builtin_ctzll(found);
            changes->positions[changes->count] = (uint32_t)(at / width + i);
            changes->differences[changes->count++] = differences[i];
        }
    }
    return left != 0;
}

#define RANK(NAME, BELOW)                                                                                              \
    void NAME(const wc_classes *classes, const uint8_t *base, size_t num_words, size_t width,                          \
              const wc_changes *changes, wc_changes *ranked) {                                                         \
        if (width == 1)                                                                                                \
            rank(classes, base, num_words, 1, changes, ranked, BELOW);                                                 \
        else if (width == 2)                                                                                           \
            rank(classes, base, num_words, 2, changes, ranked, BELOW);                                                 \
        else                                                                                                           \
            rank(classes, base, num_words, 4, changes, ranked, BELOW);                                                 \
    }
#define UNRANK(NAME, BELOW)                                                                                            \
    int NAME(const wc_classes *classes, const uint8_t *base, size_t num_words, size_t width, const wc_changes *ranked, \
             wc_changes *changes) {                                                                                    \
        return width == 1   ? unrank(classes, base, num_words, 1, ranked, changes, BELOW)                              \
               : width == 2 ? unrank(classes, base, num_words, 2, ranked, changes, BELOW)                              \
                            : unrank(classes, base, num_words, 4, ranked, changes, BELOW);                             \
    }
RANK(wc_rank_plain, wc_below_plain)
UNRANK(wc_unrank_plain, wc_below_plain)
#if defined(__x86_64__)
WC_AVX2 RANK(wc_rank_avx2, wc_below_avx2)
WC_AVX2 UNRANK(wc_unrank_avx2, wc_below_avx2)
#endif

/* Set the bounds of unused classes, so that they have no words: those between the second to last class and the last. */
static void finish(wc_classes *classes) {
    for (size_t c = classes->count - 1; c < WC_NUM_BOUNDS; c++)
        classes->bounds[c] = c ? classes->bounds[c - 1] : 0;
}

/* Estimate the bits of Rice codes of `changed` changes among `words` words. */
static uint64_t cost_of(uint64_t changed, uint64_t words) {
    if (!changed)
        return HEADER_BITS;
    uint64_t unchanged = words > changed ? words - changed : 0, least = changed + unchanged;
    for (unsigned bits = 1; bits < 20 && changed * (bits + 1) < least; bits++) {
        uint64_t found = changed * (bits + 1) + (unchanged >> bits);
        least = found < least ? found : least;
    }
    return least + HEADER_BITS;
}

/* Join neighbouring keys to groups, and groups to the classes with the shortest code, by a sample of the words and
   changes. */
static wc_classes choose(const uint8_t *base, size_t num_words, size_t width, const wc_changes *changes) {
    uint64_t words[KEYS] = {0}, changed[KEYS] = {0}, total = 0;
    size_t each = WC_BLOCK_BYTES / width;
    for (size_t first = 0; first < num_words; first += SAMPLED * each)
        for (size_t i = first; i < first + each && i < num_words; i++, total += SAMPLED)
            words[key_of(base + i * width, width)] += SAMPLED;
    size_t step = changes->count / SAMPLED_CHANGES + 1;
    for (size_t i = 0; i < changes->count; i += step)
        changed[key_of(base + changes->positions[i] * width, width)] += step;
    /* Prefix sums over groups: words and changes. */
    uint64_t sums[MOST_GROUPS + 1][2] = {{0, 0}}, group[2] = {0, 0};
    uint8_t starts[MOST_GROUPS] = {0};
    size_t groups = 0;
    for (size_t key = 0; key < KEYS; key++) {
        group[0] += words[key] > changed[key] ? words[key] : changed[key];
        group[1] += changed[key];
        int is_large = group[0] * 20 >= total || group[1] * 16 >= changes->count;
        if (key == KEYS - 1 || (is_large && groups + 1 < MOST_GROUPS)) {
            groups++;
            sums[groups][0] = sums[groups - 1][0] + group[0];
            sums[groups][1] = sums[groups - 1][1] + group[1];
            if (groups < MOST_GROUPS)
                starts[groups] = (uint8_t)(key + 1);
            group[0] = group[1] = 0;
        }
    }
    /* least[c][g]: the cost of the first g groups in c + 1 classes, of which the last begins at group from[c][g]. */
    uint64_t least[WC_MAX_CLASSES][MOST_GROUPS + 1];
    uint8_t from[WC_MAX_CLASSES][MOST_GROUPS + 1];
    size_t best = 0;
    for (size_t g = 1; g <= groups; g++) {
        least[0][g] = cost_of(sums[g][1], sums[g][0]);
        for (size_t c = 1; c < WC_MAX_CLASSES; c++)
            least[c][g] = UINT64_MAX;
        for (size_t start = 1; start < g; start++) {
            uint64_t cost = cost_of(sums[g][1] - sums[start][1], sums[g][0] - sums[start][0]);
            for (size_t c = 1; c < WC_MAX_CLASSES && c <= start; c++)
                if (least[c - 1][start] + cost < least[c][g]) {
                    least[c][g] = least[c - 1][start] + cost;
                    from[c][g] = (uint8_t)start;
                }
        }
    }
    for (size_t c = 1; c < WC_MAX_CLASSES && c < groups; c++)
        if (least[c][groups] < least[best][groups])
            best = c;
    wc_classes classes = {.count = best + 1};
    for (size_t c = best, g = groups; c > 0; c--) {
        g = from[c][g];
        classes.bounds[c - 1] = starts[g];
    }
    finish(&classes);
    return classes;
}

uint8_t *wc_write_classes(const wc_vectors *by, const uint8_t *base, size_t num_words, size_t width,
                          const wc_changes *changes, wc_changes *scratch, uint64_t limit, uint8_t *to) {
    wc_classes classes = choose(base, num_words, width, changes);
    wc_changes ranked[WC_MAX_CLASSES];
    for (size_t c = 0; c < WC_MAX_CLASSES; c++)
        ranked[c] = (wc_changes){scratch->positions + c * num_words, scratch->differences + c * num_words, 0};
    by->rank(&classes, base, num_words, width, changes, ranked);
    wc_code codes[WC_MAX_CLASSES];
    uint64_t num_bytes = classes.count;
    ranked[classes.count - 1] = ranked[WC_NUM_BOUNDS];
    for (size_t c = 0; c < classes.count; c++) {
        codes[c] = wc_choose(&ranked[c]);
        num_bytes += codes[c].num_bytes;
    }
    if (num_bytes >= limit)
        return NULL;
    *to++ = (uint8_t)classes.count;
    for (size_t c = 0; c + 1 < classes.count; c++)
        *to++ = classes.bounds[c];
    for (size_t c = 0; c < classes.count; c++)
        to = wc_write(&codes[c], &ranked[c], to);
    return to;
}

const uint8_t *wc_read_classes(const wc_vectors *by, const uint8_t *from, const uint8_t *end, const uint8_t *base,
                               size_t num_words, size_t width, size_t room, wc_changes *scratch, wc_changes *changes) {
    wc_classes classes = {.count = from < end ? *from++ : 0};
    if (!classes.count || classes.count > WC_MAX_CLASSES || (size_t)(end - from) < classes.count - 1)
        return NULL;
    for (size_t c = 0; c + 1 < classes.count; c++) {
        classes.bounds[c] = *from++;
        if ((c && classes.bounds[c] <= classes.bounds[c - 1]) || (width == 1 && classes.bounds[c] > 0x7F))
            return NULL;
    }
    finish(&classes);
    wc_changes ranked[WC_MAX_CLASSES] = {{NULL, NULL, 0}}, rest = {scratch->positions, scratch->differences, 0};
    for (size_t c = 0; c < classes.count; c++) {
        size_t former = rest.count;
        from = wc_read(from, end, num_words, width, room - former, &rest);
        if (!from)
            return NULL;
        ranked[c + 1 < classes.count ? c : WC_NUM_BOUNDS] =
            (wc_changes){rest.positions + former, rest.differences + former, rest.count - former};
    }
    return by->unrank(&classes, base, num_words, width, ranked, changes) ? NULL : from;
}
