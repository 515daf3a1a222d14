/* Deltas in the extension `weightcast.native._core`. The caller has checked memory that is given as an address. Deltas
   and changes, which may come from another process, are checked here. */
#include "delta.h"
#include "module.h"

#define MAX_WORDS ((uint64_t)1 << 32) /* since positions have 32 bits */
#define WEIGHT 64 /* a change takes about as long as copying this many bytes */

static int bad_words(unsigned long long num_words, unsigned int width) {
    if ((width == 1 || width == 2 || width == 4) && num_words <= MAX_WORDS)
        return 0;
    PyErr_Format(PyExc_ValueError, "a delta of %llu words of %u bytes, expected at most 2^32 words of 1, 2 or 4 bytes",
                 num_words, width);
    return 1;
}

static PyObject *refused(const char *why) {
    if (why == wc_no_memory)
        return PyErr_NoMemory();
    PyErr_Format(PyExc_ValueError, "the delta can't be decoded: %s", why);
    return NULL;
}

static PyThreadState *released(uint64_t bytes) { return bytes >= WC_GIL_BYTES ? PyEval_SaveThread() : NULL; }

static void acquired(PyThreadState *state) {
    if (state)
        PyEval_RestoreThread(state);
}

/* Return 1, with an exception, unless an array has `count` aligned elements of `size` bytes. */
static int bad_array(const Py_buffer *array, const char *name, uint64_t count, size_t size) {
    if ((uint64_t)array->len == count * size && !((uintptr_t)array->buf % size))
        return 0;
    PyErr_Format(PyExc_ValueError, "%zd bytes of %s at %p, expected %llu aligned elements of %zu bytes", array->len, name,
                 array->buf, (unsigned long long)count, size);
    return 1;
}

static PyObject *encode(PyObject *self, PyObject *arguments) {
    (void)self;
    unsigned long long base, words, num_words, out, out_size;
    unsigned int width;
    int by_classes, advance, threads;
    Py_buffer pieces;
    if (!PyArg_ParseTuple(arguments, "KKKIppKKw*i:delta_encode", &base, &words, &num_words, &width, &by_classes,
                          &advance, &out, &out_size, &pieces, &threads))
        return NULL;
    size_t num_pieces = (size_t)pieces.len / sizeof(wc_piece_row);
    wc_encoding all = {.base = (uint8_t *)(uintptr_t)base,
                       .words = (const uint8_t *)(uintptr_t)words,
                       .num_words = num_words,
                       .width = width,
                       .by_classes = by_classes,
                       .advance = advance,
                       .out = (uint8_t *)(uintptr_t)out,
                       .pieces = pieces.buf,
                       .num_pieces = num_pieces};
    if (bad_words(num_words, width) || bad_array(&pieces, "rows of pieces", num_pieces * WC_PIECE_WORDS, 8)) {
    } else if ((num_words && !(base && words)) || (out && out_size < wc_encode_room(num_words, width))) {
        PyErr_SetString(PyExc_ValueError, "an address is 0, or the room for the delta is too small");
    } else {
        PyThreadState *state = released(num_words * width);
        wc_encode(wc_native, &all, threads);
        acquired(state);
    }
    PyBuffer_Release(&pieces);
    if (PyErr_Occurred())
        return NULL;
    if (atomic_load(&all.failed))
        return PyErr_NoMemory();
    return Py_BuildValue("KK", (unsigned long long)all.num_bytes, (unsigned long long)atomic_load(&all.changed));
}

static PyObject *encode_room(PyObject *self, PyObject *arguments) {
    (void)self;
    unsigned long long num_words;
    unsigned int width;
    if (!PyArg_ParseTuple(arguments, "KI:delta_encode_room", &num_words, &width) || bad_words(num_words, width))
        return NULL;
    return PyLong_FromUnsignedLongLong(wc_encode_room(num_words, width));
}

static PyObject *count(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer delta;
    unsigned long long num_words;
    unsigned int width;
    int has_base;
    if (!PyArg_ParseTuple(arguments, "y*KIp:delta_count", &delta, &num_words, &width, &has_base))
        return NULL;
    uint64_t found = 0;
    const char *wrong = NULL;
    if (!bad_words(num_words, width))
        wrong = wc_delta_count(delta.buf, (uint64_t)delta.len, num_words, width, has_base, &found);
    PyBuffer_Release(&delta);
    if (PyErr_Occurred())
        return NULL;
    return wrong ? refused(wrong) : PyLong_FromUnsignedLongLong(found);
}

/* Get changes from two arrays; with `differences` of NULL, only their positions. Return 1, with an exception, if the
   arrays differ in length. */
static int bad_arrays(const Py_buffer *positions, const Py_buffer *differences, wc_changes *changes) {
    uint64_t count = (uint64_t)positions->len / sizeof *changes->positions;
    *changes = (wc_changes){positions->buf, differences ? differences->buf : NULL, count};
    return bad_array(positions, "positions", count, sizeof *changes->positions) ||
           (differences && bad_array(differences, "differences", count, sizeof *changes->differences));
}

static PyObject *decode(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer delta, positions, differences;
    unsigned long long base, num_words;
    unsigned int width;
    int threads;
    if (!PyArg_ParseTuple(arguments, "y*KKIw*w*i:delta_decode", &delta, &base, &num_words, &width, &positions,
                          &differences, &threads))
        return NULL;
    wc_changes changes;
    const char *wrong = NULL;
    if (!bad_words(num_words, width) && !bad_arrays(&positions, &differences, &changes)) {
        PyThreadState *state = released((uint64_t)delta.len + WEIGHT * changes.count);
        wrong = wc_decode(wc_native, delta.buf, (uint64_t)delta.len, (const uint8_t *)(uintptr_t)base, num_words, width,
                          &changes, threads);
        acquired(state);
    }
    PyBuffer_Release(&delta);
    PyBuffer_Release(&positions);
    PyBuffer_Release(&differences);
    if (PyErr_Occurred())
        return NULL;
    if (wrong)
        return refused(wrong);
    Py_RETURN_NONE;
}

/* The same, and return 1 unless these are changes of a payload of `num_words`. */
static int bad_changes(const Py_buffer *positions, const Py_buffer *differences, unsigned long long num_words,
                       unsigned int width, wc_changes *changes) {
    if (bad_words(num_words, width) || bad_arrays(positions, differences, changes))
        return 1;
    size_t bad = wc_bad_change(changes, num_words);
    if (bad == changes->count)
        return 0;
    PyErr_Format(PyExc_ValueError, "the position of change %zu is not above the one before, or not below %llu", bad,
                 num_words);
    return 1;
}

static PyObject *apply(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer positions, differences, lanes, former, words;
    unsigned long long payload, num_words;
    unsigned int width;
    int threads;
    if (!PyArg_ParseTuple(arguments, "KKIy*y*w*w*w*i:delta_apply", &payload, &num_words, &width, &positions,
                          &differences, &lanes, &former, &words, &threads))
        return NULL;
    wc_changes changes;
    uint64_t bytes = num_words * width, chunks = bytes / WC_CHUNK_BYTES + (bytes % WC_CHUNK_BYTES != 0);
    if (!bad_changes(&positions, &differences, num_words, width, &changes) &&
        !bad_array(&former, "former words", changes.count, sizeof(uint32_t)) &&
        !bad_array(&words, "words", changes.count, sizeof(uint32_t)) &&
        !(lanes.len && bad_array(&lanes, "lanes", bytes % 8 ? 0 : 2 * chunks, sizeof(uint64_t)))) {
        PyThreadState *state = released(WEIGHT * changes.count);
        wc_apply((uint8_t *)(uintptr_t)payload, width, &changes, lanes.len ? lanes.buf : NULL, former.buf, words.buf,
                 threads);
        acquired(state);
    }
    PyBuffer_Release(&positions);
    PyBuffer_Release(&differences);
    PyBuffer_Release(&lanes);
    PyBuffer_Release(&former);
    PyBuffer_Release(&words);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *can_scatter(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer rows;
    unsigned long long num_words;
    unsigned int width;
    if (!PyArg_ParseTuple(arguments, "y*KI:delta_can_scatter", &rows, &num_words, &width))
        return NULL;
    size_t count = (size_t)rows.len / (8 * WC_STRIDED_WORDS);
    int can = 0;
    if (!bad_words(num_words, width) && !bad_array(&rows, "rows of a table", count * WC_STRIDED_WORDS, 8))
        can = wc_bad_scatter(rows.buf, count, num_words, width) == count;
    PyBuffer_Release(&rows);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(can);
}

static PyObject *scatter(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer rows, positions, words;
    unsigned long long num_words;
    unsigned int width;
    int threads;
    if (!PyArg_ParseTuple(arguments, "y*KIy*y*i:delta_scatter", &rows, &num_words, &width, &positions, &words, &threads))
        return NULL;
    wc_changes changes;
    size_t count = (size_t)rows.len / (8 * WC_STRIDED_WORDS), bad;
    if (bad_changes(&positions, NULL, num_words, width, &changes) ||
        bad_array(&words, "words", changes.count, sizeof(uint32_t)) ||
        bad_array(&rows, "rows of a table", count * WC_STRIDED_WORDS, 8)) {
    } else if ((bad = wc_bad_scatter(rows.buf, count, num_words, width)) < count) {
        PyErr_Format(PyExc_ValueError,
                     "row %zu of the table can't take changes: its source is outside of the payload, or has words twice "
                     "or in part",
                     bad);
    } else {
        PyThreadState *state = released(WEIGHT * changes.count);
        wc_scatter(rows.buf, count, width, &changes, words.buf, threads);
        acquired(state);
    }
    PyBuffer_Release(&rows);
    PyBuffer_Release(&positions);
    PyBuffer_Release(&words);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

PyMethodDef wc_delta_methods[] = {
    {"delta_encode", encode, METH_VARARGS, NULL},   {"delta_encode_room", encode_room, METH_VARARGS, NULL},
    {"delta_count", count, METH_VARARGS, NULL},     {"delta_decode", decode, METH_VARARGS, NULL},
    {"delta_apply", apply, METH_VARARGS, NULL},     {"delta_can_scatter", can_scatter, METH_VARARGS, NULL},
    {"delta_scatter", scatter, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL},
};
