/* CPython's limited API, and what the parts of the extension that use it share. */
#ifndef WEIGHTCAST_MODULE_H
#define WEIGHTCAST_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "core.h"

PyObject *wc_places(PyObject *self, PyObject *tensors);
PyObject *wc_pairs(PyObject *self, PyObject *arguments);
PyObject *wc_same_members(PyObject *self, PyObject *arguments);

#endif
