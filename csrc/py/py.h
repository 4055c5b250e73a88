/* The extension's inside: module state, errors, arrays. Only this folder includes Python.h, only
 * py_numpy.c NumPy's headers.
 * Threads: the GIL guards everything unless said otherwise. Blocks: as the calls beneath. */
#ifndef SLIDE_PY_PY_H
#define SLIDE_PY_PY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/pool.h"
#include "train/train.h"

struct slide_py_state {
    PyObject *engine_type;
    PyObject *error_class[SLIDE_CODE_COUNT];
};

/* ---- py_module.c ---- */
struct slide_py_state *slide_py_state_of(PyObject *module);
/* Raises what err says: class by err.def, notes, "on rank N". Returns NULL. A Python exception that
 * is pending already (a signal handler's, a progress callable's) stays instead. */
PyObject *slide_py_raise(struct slide_py_state *state, const struct slide_err *err);

/* ---- py_engine.c ---- */
extern PyType_Spec slide_py_engine_spec;

/* ---- py_spec.c ---- */
/* Fills spec from the dict; texts are borrowed from it. `slides` gets a copy of layer_slides, to be
 * freed with PyMem_Free by the caller, or NULL. -1 with an exception set. */
int slide_py_spec(PyObject *dict, struct slide_train_spec *spec, uint8_t **slides);
/* Typed values by name; -1 with an exception that names the key. bool is not an int here. */
int slide_py_int(PyObject *value, const char *key, long long low, long long high, long long *out);
int slide_py_float(PyObject *value, const char *key, double *out);
int slide_py_text(PyObject *value, const char *key, const char **out);
int slide_py_dtype(PyObject *value, const char *key, enum slide_dtype *out);

/* ---- py_numpy.c ---- */
enum slide_py_kind { SLIDE_PY_I32, SLIDE_PY_F32, SLIDE_PY_U16, SLIDE_PY_I16, SLIDE_PY_ANY };

struct slide_py_array {
    void *data;
    int ndim;
    Py_ssize_t shape[8];
    Py_ssize_t count; /* elements */
};

int slide_py_numpy_init(void);
/* Borrows a C-contiguous, aligned array of the kind; `ndim` -1: any. The object must outlive it. */
int slide_py_borrow(PyObject *object, const char *name, enum slide_py_kind kind, int ndim,
                    bool writable, struct slide_py_array *out);
/* A new FP32 array; *data points into it. */
PyObject *slide_py_new_f32(int ndim, const Py_ssize_t *shape, float **data);

/* ---- py_loops.c, py_env.c: functions of the module ---- */
PyObject *slide_py_adamw(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *slide_py_triad(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *slide_py_env(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *slide_py_model_types(PyObject *module, PyObject *ignored);

#endif
