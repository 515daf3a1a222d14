/* Reads the addresses, sizes and strides of tensors, by DLPack's table of C functions if their class has one, or else
   by their Python methods; and compares the members of dicts. Runs with the GIL, and releases it now and then. */
#define _DEFAULT_SOURCE
#include "module.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MANY = 2048, HEAD_WORDS = 4, MAX_TENSOR_DIMS = 64, CPU = 1, COMPLEX = 5 };

/* --- the part of DLPack 1.x that is used here (its header: dlpack/dlpack.h of github.com/dmlc/dlpack) --- */

typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides; /* strides are in elements */
    uint64_t byte_offset;
} dl_tensor;

typedef struct {
    struct {
        uint32_t major, minor;
    } version;
    void *former;
    void *allocate, *from_object, *to_object;
    int (*tensor_of_object)(void *object, dl_tensor *out);
    void *current_stream;
} dl_exchange;

/* --- one tensor --- */

typedef struct {
    uint64_t address, dtype, device;
    int ndim, itemsize, is_cpu, is_complex;
    int64_t sizes[MAX_TENSOR_DIMS], strides[MAX_TENSOR_DIMS];
} place;

/* The class of the last tensor, and its table, if it has one. */
typedef struct {
    PyObject *type;
    const dl_exchange *exchange;
} asked;

static const dl_exchange *exchange_of(PyObject *type) {
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    if (!capsule) {
        PyErr_Clear();
        return NULL;
    }
    const dl_exchange *found = NULL;
    if (PyCapsule_IsValid(capsule, "dlpack_exchange_api")) {
        found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
        /* By DLPack's rules the table outlives the capsule. */
        if (found && (found->version.major != 1 || !found->tensor_of_object))
            found = NULL;
    }
    Py_DECREF(capsule);
    return found;
}

static int read_ints(PyObject *tensor, const char *method, int64_t *out) {
    PyObject *found = PyObject_CallMethod(tensor, method, NULL);
    PyObject *numbers = found ? PySequence_Tuple(found) : NULL;
    Py_XDECREF(found);
    if (!numbers)
        return -1;
    Py_ssize_t count = PyTuple_Size(numbers);
    if (count > MAX_TENSOR_DIMS) {
        PyErr_Format(PyExc_ValueError, "a tensor has %zd dims, expected at most %d", count, MAX_TENSOR_DIMS);
        count = -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        out[i] = PyLong_AsLongLong(PyTuple_GetItem(numbers, i));
        if (out[i] == -1 && PyErr_Occurred())
            count = -1;
    }
    Py_DECREF(numbers);
    return (int)count;
}

static long long read_int(PyObject *tensor, const char *name, int is_method) {
    PyObject *found = is_method ? PyObject_CallMethod(tensor, name, NULL) : PyObject_GetAttrString(tensor, name);
    if (!found)
        return -1;
    long long number = PyLong_AsLongLong(found);
    Py_DECREF(found);
    return number;
}

static int read_by_methods(PyObject *tensor, place *out) {
    long long address = read_int(tensor, "data_ptr", 1), itemsize = read_int(tensor, "itemsize", 0);
    if (PyErr_Occurred())
        return -1;
    PyObject *dtype = PyObject_GetAttrString(tensor, "dtype"), *device = PyObject_GetAttrString(tensor, "device");
    PyObject *is_cpu = PyObject_GetAttrString(tensor, "is_cpu"), *is_complex = NULL;
    if (dtype)
        is_complex = PyObject_GetAttrString(dtype, "is_complex");
    int failed = !dtype || !device || !is_cpu || !is_complex;
    if (!failed) {
        out->address = (uint64_t)address;
        out->itemsize = (int)itemsize;
        out->dtype = (uint64_t)(uintptr_t)dtype; /* torch's dtypes live as long as the process */
        out->device = (uint64_t)PyObject_Hash(device);
        out->is_cpu = PyObject_IsTrue(is_cpu);
        out->is_complex = PyObject_IsTrue(is_complex);
        out->ndim = read_ints(tensor, "size", out->sizes);
        failed = PyErr_Occurred() || out->ndim < 0 || read_ints(tensor, "stride", out->strides) != out->ndim;
    }
    Py_XDECREF(dtype);
    Py_XDECREF(device);
    Py_XDECREF(is_cpu);
    Py_XDECREF(is_complex);
    return failed ? -1 : 0;
}

static int read_place(PyObject *tensor, asked *last, place *out) {
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (type != last->type) {
        last->type = type;
        last->exchange = exchange_of(type);
    }
    dl_tensor found;
    if (!last->exchange || last->exchange->tensor_of_object(tensor, &found)) {
        PyErr_Clear();
        return read_by_methods(tensor, out);
    }
    if (found.ndim < 0 || found.ndim > MAX_TENSOR_DIMS || (found.ndim && (!found.shape || !found.strides)))
        return read_by_methods(tensor, out);
    out->address = (uint64_t)(uintptr_t)found.data + found.byte_offset;
    out->dtype = found.dtype.code | (uint64_t)found.dtype.bits << 8 | (uint64_t)found.dtype.lanes << 16;
    out->device = (uint32_t)found.device.type | (uint64_t)(uint32_t)found.device.id << 32;
    out->ndim = found.ndim;
    out->itemsize = (found.dtype.bits * found.dtype.lanes + 7) / 8;
    out->is_cpu = found.device.type == CPU;
    out->is_complex = found.dtype.code == COMPLEX;
    memcpy(out->sizes, found.shape, sizeof(int64_t) * (size_t)found.ndim);
    memcpy(out->strides, found.strides, sizeof(int64_t) * (size_t)found.ndim);
    return 0;
}

/* Keep the tensor alive while it is read: Python code of its class may remove it from the list. */
static int read_kept(PyObject *tensor, asked *last, place *out) {
    Py_INCREF(tensor);
    int failed = read_place(tensor, last, out);
    Py_DECREF(tensor);
    return failed;
}

/* --- bytes that grow --- */

typedef struct {
    uint8_t *data;
    size_t size, room;
} growing;

static int append(growing *all, const void *data, size_t size) {
    if (all->room - all->size < size) {
        size_t room = all->room * 2 > all->size + size ? all->room * 2 : all->size + size + 4096;
        uint8_t *moved = realloc(all->data, room);
        if (!moved) {
            PyErr_NoMemory();
            return -1;
        }
        all->data = moved;
        all->room = room;
    }
    memcpy(all->data + all->size, data, size);
    all->size += size;
    return 0;
}

static PyObject *taken(growing *all) {
    PyObject *made = PyErr_Occurred() ? NULL : PyBytes_FromStringAndSize((const char *)all->data, (Py_ssize_t)all->size);
    free(all->data);
    return made;
}

/* Release the GIL after every MANY objects, long enough for a waiting thread to wake up. */
static void give_way(Py_ssize_t number) {
    if (number % MANY == MANY - 1) {
        Py_BEGIN_ALLOW_THREADS
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
        Py_END_ALLOW_THREADS
    }
}

static void head_of(const place *found, uint64_t head[HEAD_WORDS]) {
    head[0] = found->address;
    head[1] = found->dtype;
    head[2] = found->device;
    head[3] = (uint64_t)found->ndim;
}

static int append_place(growing *all, const place *found) {
    uint64_t head[HEAD_WORDS];
    head_of(found, head);
    size_t size = sizeof(int64_t) * (size_t)found->ndim;
    return append(all, head, sizeof head) || append(all, found->sizes, size) || append(all, found->strides, size);
}

PyObject *wc_places(PyObject *self, PyObject *tensors) {
    (void)self;
    if (!PyList_Check(tensors))
        return PyErr_Format(PyExc_TypeError, "expected a list of tensors");
    growing rows = {0};
    asked last = {0};
    place found;
    for (Py_ssize_t i = 0; i < PyList_Size(tensors); i++) {
        PyObject *tensor = PyList_GetItem(tensors, i);
        if (!tensor || read_kept(tensor, &last, &found) || append_place(&rows, &found))
            break;
        give_way(i);
    }
    return taken(&rows);
}

PyObject *wc_same_places(PyObject *self, PyObject *arguments) {
    (void)self;
    PyObject *tensors, *former;
    if (!PyArg_ParseTuple(arguments, "O!S:same_places", &PyList_Type, &tensors, &former))
        return NULL;
    const char *rows = PyBytes_AsString(former);
    size_t left = (size_t)PyBytes_Size(former);
    asked last = {0};
    place found;
    for (Py_ssize_t i = 0; i < PyList_Size(tensors); i++) {
        PyObject *tensor = PyList_GetItem(tensors, i);
        if (!tensor || read_kept(tensor, &last, &found))
            return NULL;
        uint64_t head[HEAD_WORDS];
        size_t size = sizeof(int64_t) * (size_t)found.ndim, row = sizeof head + 2 * size;
        head_of(&found, head);
        if (left < row || memcmp(rows, head, sizeof head) || memcmp(rows + sizeof head, found.sizes, size) ||
            memcmp(rows + sizeof head + size, found.strides, size))
            Py_RETURN_FALSE;
        rows += row;
        left -= row;
        give_way(i);
    }
    return PyBool_FromLong(!left);
}

/* --- rows of copies --- */

enum { AS_BYTES, STRIDED, OTHERWISE };

static uint64_t extent(const place *of) {
    uint64_t end = (uint64_t)of->itemsize;
    for (int d = 0; d < of->ndim; d++)
        end += (uint64_t)(of->sizes[d] - 1) * (uint64_t)of->strides[d] * (uint64_t)of->itemsize;
    return end;
}

/* Describe a contiguous tensor of the form of `like` at an address of host memory. */
static int contiguous_at(PyObject *address, const place *like, place *out) {
    *out = (place){.dtype = like->dtype, .ndim = like->ndim, .itemsize = like->itemsize, .is_cpu = 1};
    out->address = PyLong_AsUnsignedLongLong(address);
    out->is_complex = like->is_complex;
    uint64_t stride = 1;
    for (int d = like->ndim - 1; d >= 0; d--) {
        out->sizes[d] = like->sizes[d];
        out->strides[d] = (int64_t)stride;
        stride *= (uint64_t)like->sizes[d];
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Append the rows of one pair; return its kind, or -1. Each row has the pair's `number`, to check its bounds later. */
static int append_pair(const place *target, const place *source, uint64_t piece, uint64_t number, growing *plain,
                       growing *strided) {
    if (!target->is_cpu || !source->is_cpu || target->dtype != source->dtype || target->is_complex ||
        target->ndim != source->ndim)
        return OTHERWISE;
    int dims = 0;
    uint64_t item = (uint64_t)target->itemsize;
    struct {
        uint64_t count, to, from;
    } left[MAX_TENSOR_DIMS + 1];
    for (int d = 0; d < target->ndim; d++) {
        if (target->sizes[d] != source->sizes[d])
            return OTHERWISE;
        if (!target->sizes[d])
            return AS_BYTES;
        if (target->sizes[d] == 1)
            continue;
        uint64_t count = (uint64_t)target->sizes[d], to = (uint64_t)target->strides[d] * item,
                 from = (uint64_t)source->strides[d] * item;
        /* Merge a dim into the one before if it continues that one on both sides. */
        if (dims && left[dims - 1].to == count * to && left[dims - 1].from == count * from) {
            left[dims - 1].count *= count;
            left[dims - 1].to = to;
            left[dims - 1].from = from;
        } else {
            left[dims].count = count;
            left[dims].to = to;
            left[dims++].from = from;
        }
    }
    uint64_t run = item;
    if (dims && left[dims - 1].to == item && left[dims - 1].from == item)
        run *= left[--dims].count;
    uint64_t to = target->address, from = source->address;
    int overlap = to < from + extent(source) && from < to + extent(target);
    if (dims > WC_MAX_DIMS || overlap)
        return OTHERWISE;
    if (!dims) {
        for (uint64_t at = 0; at < run; at += piece) {
            uint64_t row[4] = {to + at, from + at, run - at < piece ? run - at : piece, number};
            if (append(plain, row, sizeof row))
                return -1;
        }
        return AS_BYTES;
    }
    uint64_t row[4 + 3 * WC_MAX_DIMS] = {to, from, run};
    for (int d = 0; d < WC_MAX_DIMS; d++) {
        int k = d - (WC_MAX_DIMS - dims);
        row[3 + 3 * d] = k < 0 ? 1 : left[k].count;
        row[4 + 3 * d] = k < 0 ? 0 : left[k].to;
        row[5 + 3 * d] = k < 0 ? 0 : left[k].from;
    }
    row[3 + 3 * WC_MAX_DIMS] = number;
    /* Split along the first dim, so that several threads can copy it. */
    uint64_t *first = &row[3 + 3 * (WC_MAX_DIMS - dims)], count = first[0], inner = run;
    for (int k = 1; k < dims; k++)
        inner *= left[k].count;
    uint64_t step = inner >= piece ? 1 : piece / inner;
    for (uint64_t at = 0; at < count; at += step) {
        first[0] = count - at < step ? count - at : step;
        row[0] = to + at * first[1];
        row[1] = from + at * first[2];
        if (append(strided, row, sizeof row))
            return -1;
    }
    return STRIDED;
}

PyObject *wc_pairs(PyObject *self, PyObject *arguments) {
    (void)self;
    PyObject *targets, *sources;
    unsigned long long piece;
    if (!PyArg_ParseTuple(arguments, "OOK:pairs", &targets, &sources, &piece))
        return NULL;
    if (!PyList_Check(targets) || !PyList_Check(sources) || PyList_Size(targets) != PyList_Size(sources) || !piece)
        return PyErr_Format(PyExc_ValueError, "expected two lists of tensors of one length, and a positive piece size");
    growing plain = {0}, strided = {0}, kinds = {0}, places = {0};
    asked last_target = {0}, last_source = {0};
    place target, source;
    for (Py_ssize_t i = 0; i < PyList_Size(targets); i++) {
        PyObject *into = PyList_GetItem(targets, i), *of = into ? PyList_GetItem(sources, i) : NULL;
        Py_XINCREF(into);
        Py_XINCREF(of);
        int failed = !of;
        if (!failed && PyLong_Check(into))
            failed = read_kept(of, &last_source, &source) || contiguous_at(into, &source, &target);
        else if (!failed && PyLong_Check(of))
            failed = read_kept(into, &last_target, &target) || contiguous_at(of, &target, &source);
        else if (!failed)
            failed = read_kept(into, &last_target, &target) || read_kept(of, &last_source, &source);
        Py_XDECREF(into);
        Py_XDECREF(of);
        if (failed)
            break;
        int kind = append_pair(&target, &source, piece, (uint64_t)i, &plain, &strided);
        uint8_t said = (uint8_t)kind;
        if (kind < 0 || append(&kinds, &said, 1) || append_place(&places, &target))
            break;
        give_way(i);
    }
    PyObject *first = taken(&plain), *second = taken(&strided), *third = taken(&kinds), *fourth = taken(&places);
    PyObject *made = first && second && third && fourth ? PyTuple_Pack(4, first, second, third, fourth) : NULL;
    Py_XDECREF(first);
    Py_XDECREF(second);
    Py_XDECREF(third);
    Py_XDECREF(fourth);
    return made;
}

/* --- members of dicts --- */

static int same_name(PyObject *a, PyObject *b) { return a == b ? 1 : PyObject_RichCompareBool(a, b, Py_EQ); }

PyObject *wc_same_members(PyObject *self, PyObject *arguments) {
    (void)self;
    PyObject *dicts, *sizes, *names, *values;
    if (!PyArg_ParseTuple(arguments, "O!O!O!O!:same_members", &PyList_Type, &dicts, &PyList_Type, &sizes, &PyList_Type,
                          &names, &PyList_Type, &values))
        return NULL;
    Py_ssize_t number = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(dicts); i++) {
        PyObject *each = PyList_GetItem(dicts, i), *size = each ? PyList_GetItem(sizes, i) : NULL;
        if (!size)
            return NULL;
        if (!PyDict_Check(each))
            return PyErr_Format(PyExc_TypeError, "expected a list of dicts");
        if (PyDict_Size(each) != PyLong_AsSsize_t(size)) {
            if (PyErr_Occurred())
                return NULL;
            Py_RETURN_FALSE;
        }
        PyObject *name, *value;
        for (Py_ssize_t position = 0; PyDict_Next(each, &position, &name, &value); number++) {
            PyObject *former_name = PyList_GetItem(names, number);
            PyObject *former = former_name ? PyList_GetItem(values, number) : NULL;
            if (!former)
                return NULL;
            int same = value == former ? same_name(name, former_name) : 0;
            if (same < 0)
                return NULL;
            if (!same)
                Py_RETURN_FALSE;
        }
        give_way(i);
    }
    Py_RETURN_TRUE;
}
