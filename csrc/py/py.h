/* The extension's inside: module state, errors, typed values, arrays. Only this folder includes
 * Python.h, only py_numpy.c NumPy's headers. Functions that can fail return -1 or NULL with a
 * Python exception set, unless said otherwise.
 * Threads: the GIL guards everything unless said otherwise. Blocks: as the calls beneath. */
#ifndef SLIDE_PY_PY_H
#define SLIDE_PY_PY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/err.h"
#include "base/pool.h"
#include "train/train.h"

#define SLIDE_PY_POOLS 4
#define SLIDE_PY_THREADS_MAX 4096

struct slide_py_state {
    PyTypeObject *engine_type;
    PyObject *error_class[SLIDE_CODE_COUNT];
    /* Pools that adamw and triad have used, so that a benchmark doesn't time thread creation. */
    struct {
        struct slide_pool *pool; /* NULL: free entry */
        pid_t pid;               /* a child of fork has none of the parent's threads */
    } pool[SLIDE_PY_POOLS];
};

/* ---- py_module.c ---- */
struct slide_py_state *slide_py_state_of(PyObject *module);
/* Raises what err says: class by err.def, errno, notes, "on rank N". Returns NULL. A Python
 * exception that is pending already (a signal handler's, a progress callable's) stays instead. */
PyObject *slide_py_raise(struct slide_py_state *state, const struct slide_err *err);
PyObject *slide_py_text(const char *text); /* str; bytes that are not UTF-8 become \xNN */

/* ---- py_engine.c ---- */
extern PyType_Spec slide_py_engine_spec;

/* ---- py_value.c: typed values. `what` names the value in messages. ---- */
/* Objects with __index__ but no bool. */
int slide_py_int(PyObject *value, const char *what, long long low, long long high, long long *out);
int slide_py_uint64(PyObject *value, const char *what, uint64_t *out);
/* Finite; anything with __float__ or __index__ but no bool. */
int slide_py_float(PyObject *value, const char *what, double *out);
/* UTF-8 without NUL, borrowed from the str. */
int slide_py_str(PyObject *value, const char *what, const char **out);

enum slide_py_kind {
    SLIDE_PY_OTHER, /* the caller reads it */
    SLIDE_PY_INT,
    SLIDE_PY_INT32,
    SLIDE_PY_INT64,
    SLIDE_PY_UINT64,
    SLIDE_PY_BOOL,
    SLIDE_PY_FLAG, /* a bool in an int32_t */
    SLIDE_PY_DOUBLE,
    SLIDE_PY_FLOAT,
    SLIDE_PY_STR,
    SLIDE_PY_PATH,  /* str or os.PathLike -> const char * in the file system's encoding */
    SLIDE_PY_CHOICE /* a str out of `choices` -> an enum, 0 for the first */
};

/* A field of a C struct and how it is read from a dict. */
struct slide_py_field {
    const char *key;
    enum slide_py_kind kind;
    bool required;
    size_t offset;
    long long low, high;        /* numbers; equal: no limit for doubles */
    const char *const *choices; /* NULL-terminated */
    int element;                /* py_kernel.c: what an array holds, and */
    int mode;                   /* how it is used */
};

/* The mapping itself if it is a dict, else a copy as one, which `keep` owns. */
PyObject *slide_py_dict(PyObject *mapping, const char *what, PyObject *keep);
/* Reads dict into the struct at `base`. Keys that are not in the table, required ones that are
 * missing and values of a wrong type are TypeErrors, values out of range ValueErrors; all name
 * `what` and the key. Absent keys leave their field as it is. `keep`, a list, gets every object
 * that the struct borrows from. */
int slide_py_fields(PyObject *dict, const char *what, const struct slide_py_field *field,
                    size_t count, void *base, PyObject *keep);
/* One value of a field. */
int slide_py_value(const struct slide_py_field *field, PyObject *value, const char *what,
                   void *base, PyObject *keep);
/* dict[key], kept alive by `keep`; NULL without an exception when absent. */
PyObject *slide_py_item(PyObject *dict, const char *key, PyObject *keep);

/* ---- py_spec.c ---- */
/* Fills spec; what it points to lives as long as `keep`, a list. */
int slide_py_spec(PyObject *dict, struct slide_train_spec *spec, PyObject *keep);
/* A sequence of Part. The result is for PyMem_Free; texts live as long as `keep`. */
struct slide_part *slide_py_parts(PyObject *sequence, int *count, PyObject *keep);
/* A sequence of MicroBatch, or one. Arrays live as long as `keep`. */
struct slide_batch *slide_py_batches(PyObject *sequence, int *count, PyObject *keep);
int slide_py_batch(PyObject *mapping, const char *what, struct slide_batch *batch, PyObject *keep);

/* ---- py_numpy.c ---- */
enum slide_py_element { SLIDE_PY_I32, SLIDE_PY_F32, SLIDE_PY_U16, SLIDE_PY_I16 };

struct slide_py_array {
    void *data;
    int ndim;
    Py_ssize_t shape[4];
    Py_ssize_t count; /* elements */
};

int slide_py_numpy_init(void);
bool slide_py_is_bool(PyObject *value); /* Python's or NumPy's */
/* Borrows a C-contiguous, aligned array in the machine's byte order; `ndim` -1: any. The object
 * must outlive it. */
int slide_py_borrow(PyObject *object, const char *what, enum slide_py_element element, int ndim,
                    bool writable, struct slide_py_array *out);
/* A new FP32 array; *data points into it. */
PyObject *slide_py_new_f32(int ndim, const Py_ssize_t *shape, float **data);

/* ---- py_loops.c, py_kernel.c, py_env.c: functions of the module ---- */
PyObject *slide_py_adamw(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *slide_py_triad(PyObject *module, PyObject *args, PyObject *kwargs);
void slide_py_pools_free(struct slide_py_state *state);
PyObject *slide_py_kernel(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *slide_py_env(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *slide_py_devices(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *slide_py_model_types(PyObject *module, PyObject *ignored);

#endif
