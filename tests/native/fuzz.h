/* Random numbers and memory for the programs that try the native core. */
#ifndef WEIGHTCAST_FUZZ_H
#define WEIGHTCAST_FUZZ_H

#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern uint64_t state;

static inline uint64_t drawn(uint64_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return below ? state % below : 0;
}

#define REQUIRE(condition)                                                                                             \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static inline uint8_t *noise(size_t size) {
    uint8_t *made = malloc(size ? size : 1);
    REQUIRE(made);
    for (size_t i = 0; i < size; i++)
        made[i] = (uint8_t)drawn(256);
    return made;
}

static inline const wc_vectors *some_vectors(void) { return drawn(2) ? wc_native : &wc_plain; }

void deltas(void);
void hostile_deltas(void);

#endif
