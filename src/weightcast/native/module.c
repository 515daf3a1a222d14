/* The extension `weightcast.native._core`; _core.pyi has its types. Only the package's own Python calls it, and checks
   the rows of tables against the memory at their addresses. The code here checks the sizes of tables. */
#include "module.h"

#include <errno.h>

/* Copies of less than this don't bypass the caches. */
#define STREAMED_BYTES ((uint64_t)1 << 20)
#define THREAD_BYTES ((uint64_t)1 << 20)

typedef struct {
    Py_buffer view;
    const uint64_t *words;
    size_t rows;
} table;

static int get_table(PyObject *from, size_t words, table *out) {
    if (PyObject_GetBuffer(from, &out->view, PyBUF_SIMPLE))
        return -1;
    out->words = out->view.buf;
    out->rows = (size_t)out->view.len / (8 * words);
    if ((size_t)out->view.len % (8 * words) || (uintptr_t)out->view.buf % 8) {
        PyErr_Format(PyExc_ValueError, "a table has %zd bytes at %p, expected aligned rows of %zu words of 8 bytes",
                     out->view.len, out->view.buf, words);
        PyBuffer_Release(&out->view);
        return -1;
    }
    return 0;
}

static PyObject *refused(table *from, size_t row, const char *why) {
    PyErr_Format(PyExc_ValueError, "row %zu of the table %s", row, why);
    PyBuffer_Release(&from->view);
    return NULL;
}

static int too_large(uint64_t address, uint64_t size) {
    if (size <= WC_MAX_BYTES && (!size || address))
        return 0;
    PyErr_Format(PyExc_ValueError, "%llu bytes at %p, expected at most 2^47 bytes at an address that is not 0",
                 (unsigned long long)size, (void *)(uintptr_t)address);
    return 1;
}

static int num_threads(int asked, uint64_t bytes) {
    uint64_t most = bytes / THREAD_BYTES + 1;
    return (uint64_t)asked < most ? asked : (int)most;
}

typedef void copy_call(const wc_vectors *by, const uint64_t *words, size_t rows, int stream, int threads);

static PyObject *copied(PyObject *arguments, size_t words, copy_call *call) {
    PyObject *rows;
    int threads, cached;
    table from;
    if (!PyArg_ParseTuple(arguments, "Oip", &rows, &threads, &cached) || get_table(rows, words, &from))
        return NULL;
    uint64_t bytes;
    size_t bad = wc_bad_copy(from.words, from.rows, words, &bytes);
    if (bad < from.rows)
        return refused(&from, bad, "is invalid: an address is 0, or the sizes add up to more than 2^47 bytes");
    int stream = !cached && bytes >= STREAMED_BYTES;
    threads = num_threads(threads, bytes);
    PyThreadState *state = bytes >= WC_GIL_BYTES ? PyEval_SaveThread() : NULL;
    call(wc_native, from.words, from.rows, stream, threads);
    if (state)
        PyEval_RestoreThread(state);
    PyBuffer_Release(&from.view);
    Py_RETURN_NONE;
}

static void plain_call(const wc_vectors *by, const uint64_t *words, size_t rows, int stream, int threads) {
    wc_copy(by, (const wc_copy_row *)words, rows, stream, threads);
}

static void strided_call(const wc_vectors *by, const uint64_t *words, size_t rows, int stream, int threads) {
    wc_copy_strided(by, (const wc_strided_row *)words, rows, stream, threads);
}

static PyObject *copy(PyObject *self, PyObject *arguments) {
    (void)self;
    return copied(arguments, WC_COPY_WORDS, plain_call);
}

static PyObject *copy_strided(PyObject *self, PyObject *arguments) {
    (void)self;
    return copied(arguments, WC_STRIDED_WORDS, strided_call);
}

static PyObject *sums_as_ints(wc_sums *sums) {
    return Py_BuildValue("KK", (unsigned long long)atomic_load(&sums->low), (unsigned long long)atomic_load(&sums->high));
}

static PyObject *digest(PyObject *self, PyObject *arguments) {
    (void)self;
    unsigned long long address, size;
    PyObject *rows;
    int threads;
    table from;
    if (!PyArg_ParseTuple(arguments, "KKOi:digest", &address, &size, &rows, &threads))
        return NULL;
    if (too_large(address, size) || get_table(rows, WC_RUN_WORDS, &from))
        return NULL;
    wc_sums sums;
    atomic_init(&sums.low, 0);
    atomic_init(&sums.high, 0);
    PyThreadState *state = size >= WC_GIL_BYTES ? PyEval_SaveThread() : NULL;
    for (size_t i = 0; i < from.rows; i++) {
        const uint64_t *row = from.words + WC_RUN_WORDS * i;
        uint64_t count = row[1] > row[0] ? row[1] - row[0] : 0;
        wc_digest(wc_native, (const uint8_t *)(uintptr_t)address, size, row[0], row[1], &sums,
                  num_threads(threads, count > size / WC_CHUNK_BYTES ? size : count * WC_CHUNK_BYTES));
    }
    if (state)
        PyEval_RestoreThread(state);
    PyBuffer_Release(&from.view);
    return sums_as_ints(&sums);
}

/* Get the lanes of a payload: two for each chunk. */
static int get_lanes(PyObject *from, unsigned long long size, table *out) {
    uint64_t chunks = size / WC_CHUNK_BYTES + (size % WC_CHUNK_BYTES != 0);
    if (get_table(from, WC_LANES_WORDS, out))
        return -1;
    if (out->rows == chunks)
        return 0;
    PyErr_Format(PyExc_ValueError, "lanes of %zu chunks, expected those of %llu bytes", out->rows, size);
    PyBuffer_Release(&out->view);
    return -1;
}

static PyObject *chunk_lanes(PyObject *self, PyObject *arguments) {
    (void)self;
    unsigned long long address, size;
    PyObject *lanes;
    int threads;
    table to;
    if (!PyArg_ParseTuple(arguments, "KKOi:chunk_lanes", &address, &size, &lanes, &threads))
        return NULL;
    if (too_large(address, size) || get_lanes(lanes, size, &to))
        return NULL;
    threads = num_threads(threads, size);
    PyThreadState *state = size >= WC_GIL_BYTES ? PyEval_SaveThread() : NULL;
    wc_lanes(wc_native, (const uint8_t *)(uintptr_t)address, size, to.view.buf, threads);
    if (state)
        PyEval_RestoreThread(state);
    PyBuffer_Release(&to.view);
    Py_RETURN_NONE;
}

static PyObject *digest_lanes(PyObject *self, PyObject *arguments) {
    (void)self;
    unsigned long long size;
    PyObject *lanes;
    table from;
    if (!PyArg_ParseTuple(arguments, "OK:digest_lanes", &lanes, &size) || get_lanes(lanes, size, &from))
        return NULL;
    wc_sums sums;
    atomic_init(&sums.low, 0);
    atomic_init(&sums.high, 0);
    wc_digest_lanes(from.words, size, &sums);
    PyBuffer_Release(&from.view);
    return sums_as_ints(&sums);
}

static PyObject *copy_and_digest(PyObject *self, PyObject *arguments) {
    (void)self;
    unsigned long long address, size;
    PyObject *rows;
    int threads, cached;
    table from;
    if (!PyArg_ParseTuple(arguments, "KKOip:copy_and_digest", &address, &size, &rows, &threads, &cached))
        return NULL;
    if (too_large(address, size) || get_table(rows, WC_COPY_WORDS, &from))
        return NULL;
    const wc_pack_row *row = (const wc_pack_row *)from.words;
    size_t bad = wc_bad_pack(row, from.rows, size);
    if (bad < from.rows)
        return refused(&from, bad, "overlaps the one before, or reaches outside of the payload");
    wc_sums sums;
    atomic_init(&sums.low, 0);
    atomic_init(&sums.high, 0);
    int stream = !cached && size >= STREAMED_BYTES;
    threads = num_threads(threads, size);
    PyThreadState *state = size >= WC_GIL_BYTES ? PyEval_SaveThread() : NULL;
    wc_copy_and_digest(wc_native, (uint8_t *)(uintptr_t)address, size, row, from.rows, &sums, stream, threads);
    if (state)
        PyEval_RestoreThread(state);
    PyBuffer_Release(&from.view);
    return sums_as_ints(&sums);
}

static PyObject *digest_words(PyObject *self, PyObject *arguments) {
    (void)self;
    unsigned long long address, first;
    unsigned int itemsize;
    PyObject *rows;
    int threads;
    table from;
    if (!PyArg_ParseTuple(arguments, "KIKOi:digest_words", &address, &itemsize, &first, &rows, &threads) ||
        get_table(rows, WC_COPY_WORDS, &from))
        return NULL;
    const wc_words_dim *dims = (const wc_words_dim *)from.words;
    uint64_t bytes;
    if (wc_bad_words(address, itemsize, dims, from.rows, &bytes)) {
        PyErr_Format(PyExc_ValueError,
                     "elements of %u bytes at %p, expected 1, 2, 4, 8 or 16 bytes at an address that is not 0, and at "
                     "most 64 dims over 2^47 bytes",
                     itemsize, (void *)(uintptr_t)address);
        PyBuffer_Release(&from.view);
        return NULL;
    }
    wc_sums sums;
    atomic_init(&sums.low, 0);
    atomic_init(&sums.high, 0);
    threads = num_threads(threads, bytes);
    PyThreadState *state = bytes >= WC_GIL_BYTES ? PyEval_SaveThread() : NULL;
    wc_digest_words(wc_native, address, itemsize, first, dims, from.rows, &sums, threads);
    if (state)
        PyEval_RestoreThread(state);
    PyBuffer_Release(&from.view);
    return sums_as_ints(&sums);
}

static PyObject *quantise(PyObject *self, PyObject *arguments) {
    (void)self;
    PyObject *rows;
    int threads;
    table from;
    if (!PyArg_ParseTuple(arguments, "Oi:quantise", &rows, &threads) || get_table(rows, WC_MATRIX_WORDS, &from))
        return NULL;
    for (size_t i = 0; i < from.rows; i++) {
        const wc_matrix *matrix = (const wc_matrix *)from.words + i;
        if (!(matrix->source && matrix->target && matrix->scales && matrix->block_rows && matrix->block_columns) ||
            (matrix->width != 2 && matrix->width != 4) || !matrix->num_rows || !matrix->num_columns ||
            matrix->num_columns > WC_MAX_BYTES / matrix->width / matrix->num_rows)
            return refused(&from, i, "is invalid: an address, a size or the width of elements");
    }
    PyThreadState *state = PyEval_SaveThread();
    for (size_t i = 0; i < from.rows; i++) {
        const wc_matrix *matrix = (const wc_matrix *)from.words + i;
        uint64_t bytes = matrix->num_rows * matrix->num_columns * matrix->width;
        wc_quantise(wc_native, matrix, num_threads(threads, bytes));
    }
    PyEval_RestoreThread(state);
    PyBuffer_Release(&from.view);
    Py_RETURN_NONE;
}

static PyObject *populate(PyObject *self, PyObject *arguments) {
    (void)self;
    unsigned long long address, size;
    if (!PyArg_ParseTuple(arguments, "KK:populate", &address, &size))
        return NULL;
    if (too_large(address, size))
        return NULL;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = wc_populate(address, size);
    Py_END_ALLOW_THREADS
    if (failed && failed != EINVAL) {
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyBool_FromLong(!failed);
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, NULL},
    {"copy_strided", copy_strided, METH_VARARGS, NULL},
    {"digest", digest, METH_VARARGS, NULL},
    {"chunk_lanes", chunk_lanes, METH_VARARGS, NULL},
    {"digest_lanes", digest_lanes, METH_VARARGS, NULL},
    {"copy_and_digest", copy_and_digest, METH_VARARGS, NULL},
    {"digest_words", digest_words, METH_VARARGS, NULL},
    {"quantise", quantise, METH_VARARGS, NULL},
    {"populate", populate, METH_VARARGS, NULL},
    {"places", wc_places, METH_O, NULL},
    {"pairs", wc_pairs, METH_VARARGS, NULL},
    {"same_members", wc_same_members, METH_VARARGS, NULL},
    {"same_places", wc_same_places, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int begin(PyObject *module) {
    wc_begin();
    return PyModule_AddFunctions(module, wc_delta_methods) ||
                   PyModule_AddIntConstant(module, "CHUNK_BYTES", WC_CHUNK_BYTES) ||
                   PyModule_AddIntConstant(module, "MAX_THREADS", WC_MAX_THREADS) ||
                   PyModule_AddStringConstant(module, "VECTORS", wc_native->name)
               ? -1
               : 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)(uintptr_t)begin},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_core",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
