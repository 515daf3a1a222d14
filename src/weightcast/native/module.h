/* CPython's limited API, and declarations for the files of the extension that use it. */
#ifndef WEIGHTCAST_MODULE_H
#define WEIGHTCAST_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "core.h"

/* With less work than this the GIL is kept, since acquiring it again can take longer. */
#define WC_GIL_BYTES ((uint64_t)64 << 10)

extern PyMethodDef wc_delta_methods[];
PyObject *wc_places(PyObject *self, PyObject *tensors);
PyObject *wc_pairs(PyObject *self, PyObject *arguments);
PyObject *wc_same_members(PyObject *self, PyObject *arguments);
PyObject *wc_same_places(PyObject *self, PyObject *arguments);

#endif
