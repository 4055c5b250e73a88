/* Arrays in and out: the only file that includes NumPy's headers. Nothing is converted: an array of
 * another type or layout is the caller's mistake, and a copy that nobody asked for would hide it.
 * Called by the other files of this folder. */
#include "py/py.h"

#include <numpy/arrayobject.h>

int slide_py_numpy_init(void)
{
    import_array1(-1);
    return 0;
}

static const struct {
    int type;
    const char *name;
} elements[] = {
    [SLIDE_PY_I32] = {NPY_INT32, "int32"},
    [SLIDE_PY_F32] = {NPY_FLOAT32, "float32"},
    [SLIDE_PY_U16] = {NPY_UINT16, "uint16"},
    [SLIDE_PY_I16] = {NPY_INT16, "int16"},
};

bool slide_py_is_bool(PyObject *value)
{
    return PyBool_Check(value) || PyArray_IsScalar(value, Bool);
}

int slide_py_borrow(PyObject *object, const char *what, enum slide_py_element element, int ndim,
                    bool writable, struct slide_py_array *out)
{
    if (!PyArray_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: a NumPy array is wanted, not %.100s", what,
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    if (PyArray_TYPE(array) != elements[element].type) {
        PyErr_Format(PyExc_TypeError, "%s: an array of %s is wanted, not of %S", what,
                     elements[element].name, (PyObject *)PyArray_DESCR(array));
        return -1;
    }
    if (!PyArray_ISCARRAY_RO(array) || (writable && !PyArray_ISWRITEABLE(array))) {
        PyErr_Format(PyExc_ValueError, "%s: the array must be C-contiguous, aligned%s", what,
                     writable ? " and writable" : " and in the machine's byte order");
        return -1;
    }
    int found = PyArray_NDIM(array);
    if (ndim >= 0 && found != ndim) {
        PyErr_Format(PyExc_ValueError, "%s: %d dimension%s wanted, not %d", what, ndim,
                     ndim == 1 ? " is" : "s are", found);
        return -1;
    }
    *out = (struct slide_py_array){
        .data = PyArray_DATA(array), .ndim = found, .count = PyArray_SIZE(array)};
    for (int i = 0; i < found && i < (int)(sizeof out->shape / sizeof *out->shape); i++)
        out->shape[i] = PyArray_DIM(array, i);
    return 0;
}

PyObject *slide_py_new_f32(int ndim, const Py_ssize_t *shape, float **data)
{
    npy_intp dims[4];
    for (int i = 0; i < ndim; i++)
        dims[i] = shape[i];
    PyObject *array = PyArray_SimpleNew(ndim, dims, NPY_FLOAT32);
    if (array)
        *data = PyArray_DATA((PyArrayObject *)array);
    return array;
}
