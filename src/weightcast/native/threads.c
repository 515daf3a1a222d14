/* Threads that are made and joined within one call, so that the process may fork at any other time. */
#define _DEFAULT_SOURCE
#include "core.h"

#include <pthread.h>
#include <signal.h>

typedef struct {
    void (*work)(void *context, size_t first, size_t last);
    void *context;
    size_t count, grain;
    _Atomic size_t next;
} team;

static void *run(void *argument) {
    team *all = argument;
    for (;;) {
        size_t first = atomic_fetch_add(&all->next, all->grain);
        if (first >= all->count)
            return NULL;
        size_t last = all->count - first < all->grain ? all->count : first + all->grain;
        all->work(all->context, first, last);
    }
}

void wc_parallel(void (*work)(void *context, size_t first, size_t last), void *context, size_t count, size_t grain,
                 int threads) {
    team all = {.work = work, .context = context, .count = count, .grain = grain};
    pthread_t others[WC_MAX_THREADS];
    int made = 0;
    atomic_init(&all.next, 0);
    size_t parts = (count + grain - 1) / grain;
    if (threads > WC_MAX_THREADS)
        threads = WC_MAX_THREADS;
    if (threads > 1 && parts > 1) {
        /* Block all signals in the new threads, so that the process's own threads handle them. */
        sigset_t every, former;
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &former);
        while (made + 1 < threads && (size_t)made + 1 < parts && !pthread_create(&others[made], NULL, run, &all))
            made++;
        pthread_sigmask(SIG_SETMASK, &former, NULL);
    }
    run(&all);
    while (made)
        pthread_join(others[--made], NULL);
}
