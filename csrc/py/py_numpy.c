/* Arrays in and out: the only file that includes NumPy's headers. */
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
} kinds[] = {
    [SLIDE_PY_I32] = {NPY_INT32, "int32"},
    [SLIDE_PY_F32] = {NPY_FLOAT32, "float32"},
    [SLIDE_PY_U16] = {NPY_UINT16, "uint16"},
    [SLIDE_PY_I16] = {NPY_INT16, "int16"},
};

int slide_py_borrow(PyObject *object, const char *name, enum slide_py_kind kind, int ndim,
                    bool writable, struct slide_py_array *out)
{
    if (!PyArray_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: a NumPy array is wanted, not %.100s", name,
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    if (kind != SLIDE_PY_ANY && PyArray_TYPE(array) != kinds[kind].type) {
        PyErr_Format(PyExc_TypeError, "%s: an array of %s is wanted, not %R", name,
                     kinds[kind].name, (PyObject *)PyArray_DESCR(array));
        return -1;
    }
    if (!PyArray_ISCARRAY_RO(array) || (writable && !PyArray_ISWRITEABLE(array))) {
        PyErr_Format(PyExc_ValueError, "%s: the array must be C-contiguous, aligned%s", name,
                     writable ? " and writable" : "");
        return -1;
    }
    if ((ndim >= 0 && PyArray_NDIM(array) != ndim) || PyArray_NDIM(array) > 8) {
        PyErr_Format(PyExc_ValueError, "%s: %d dimensions are wanted, not %d", name, ndim,
                     PyArray_NDIM(array));
        return -1;
    }
    *out = (struct slide_py_array){
        .data = PyArray_DATA(array), .ndim = PyArray_NDIM(array), .count = PyArray_SIZE(array)};
    for (int i = 0; i < out->ndim; i++)
        out->shape[i] = PyArray_DIM(array, i);
    return 0;
}

PyObject *slide_py_new_f32(int ndim, const Py_ssize_t *shape, float **data)
{
    npy_intp dims[8];
    for (int i = 0; i < ndim; i++)
        dims[i] = shape[i];
    PyObject *array = PyArray_SimpleNew(ndim, dims, NPY_FLOAT32);
    if (array)
        *data = PyArray_DATA((PyArrayObject *)array);
    return array;
}
