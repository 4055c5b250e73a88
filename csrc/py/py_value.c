/* Python values as C values: each checked for its type and range, with an error that names it. A
 * bool is no int here and an int no bool: True where a number belongs is a mistake more often than
 * a wish. Dicts are read by tables of fields, which also say what keys there are.
 * Called by the other files of this folder. */
#include <math.h>
#include <string.h>

#include "py/py.h"

static int wrong_type(PyObject *value, const char *what, const char *wanted)
{
    PyErr_Format(PyExc_TypeError, "%s: %s is wanted, not %.100s", what, wanted,
                 Py_TYPE(value)->tp_name);
    return -1;
}

static PyObject *index_of(PyObject *value, const char *what)
{
    if (!slide_py_is_bool(value) && PyIndex_Check(value))
        return PyNumber_Index(value);
    wrong_type(value, what, "an int");
    return NULL;
}

int slide_py_int(PyObject *value, const char *what, long long low, long long high, long long *out)
{
    PyObject *number = index_of(value, what);
    if (!number)
        return -1;
    int overflow, failed = -1;
    *out = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow || *out < low || *out > high)
        PyErr_Format(PyExc_ValueError, "%s: %.200S is not in %lld to %lld", what, number, low,
                     high);
    else
        failed = 0;
    Py_DECREF(number);
    return failed;
}

int slide_py_uint64(PyObject *value, const char *what, uint64_t *out)
{
    PyObject *number = index_of(value, what);
    if (!number)
        return -1;
    int failed = 0;
    *out = PyLong_AsUnsignedLongLong(number);
    if (*out == UINT64_MAX && PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError, "%s: %.200S is not in 0 to 2^64 - 1", what, number);
        failed = -1;
    }
    Py_DECREF(number);
    return failed;
}

int slide_py_float(PyObject *value, const char *what, double *out)
{
    const PyNumberMethods *number = Py_TYPE(value)->tp_as_number;
    if (slide_py_is_bool(value) || !number || (!number->nb_float && !number->nb_index))
        return wrong_type(value, what, "a float");
    *out = PyFloat_AsDouble(value);
    if (*out == -1.0 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return -1;
        *out = INFINITY; /* an int that no double holds */
    }
    if (isfinite(*out))
        return 0;
    PyErr_Format(PyExc_ValueError, "%s: a finite number is wanted", what);
    return -1;
}

int slide_py_str(PyObject *value, const char *what, const char **out)
{
    Py_ssize_t size;
    if (!PyUnicode_Check(value))
        return wrong_type(value, what, "a str");
    *out = PyUnicode_AsUTF8AndSize(value, &size);
    if (!*out)
        return -1;
    if (strlen(*out) == (size_t)size)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s: %R has a NUL character", what, value);
    return -1;
}

static int read_path(PyObject *value, const char *what, const char **out, PyObject *keep)
{
    PyObject *bytes;
    if (!PyUnicode_Check(value) && !PyObject_HasAttrString(value, "__fspath__"))
        return wrong_type(value, what, "a path");
    if (!PyUnicode_FSConverter(value, &bytes)) /* refuses NUL */
        return -1;
    int failed = PyList_Append(keep, bytes);
    *out = PyBytes_AS_STRING(bytes);
    Py_DECREF(bytes);
    return failed;
}

static int read_choice(PyObject *value, const char *what, const char *const *choices, int *out)
{
    const char *text;
    char list[200] = "";
    if (slide_py_str(value, what, &text))
        return -1;
    for (int i = 0; choices[i]; i++) {
        if (!strcmp(choices[i], text)) {
            *out = i;
            return 0;
        }
        size_t used = strlen(list);
        PyOS_snprintf(list + used, sizeof list - used, "%s\"%s\"", i ? ", " : "", choices[i]);
    }
    PyErr_Format(PyExc_ValueError, "%s: %R is none of %s", what, value, list);
    return -1;
}

static int read_double(const struct slide_py_field *f, PyObject *value, const char *what,
                       double *out)
{
    if (slide_py_float(value, what, out))
        return -1;
    if (f->low == f->high || (*out >= (double)f->low && *out <= (double)f->high))
        return 0;
    PyErr_Format(PyExc_ValueError, "%s: %S is not in %lld to %lld", what, value, f->low, f->high);
    return -1;
}

int slide_py_value(const struct slide_py_field *f, PyObject *value, const char *what, void *base,
                   PyObject *keep)
{
    char *at = (char *)base + f->offset;
    long long number = 0;
    double real = 0;
    switch (f->kind) {
    case SLIDE_PY_OTHER:
        return 0;
    case SLIDE_PY_INT:
    case SLIDE_PY_INT32:
    case SLIDE_PY_INT64:
    case SLIDE_PY_UINT64:
        if (slide_py_int(value, what, f->low, f->high, &number))
            return -1;
        if (f->kind == SLIDE_PY_INT)
            *(int *)at = (int)number;
        else if (f->kind == SLIDE_PY_INT32)
            *(int32_t *)at = (int32_t)number;
        else if (f->kind == SLIDE_PY_INT64)
            *(int64_t *)at = number;
        else
            *(uint64_t *)at = (uint64_t)number;
        return 0;
    case SLIDE_PY_BOOL:
    case SLIDE_PY_FLAG:
        if (!PyBool_Check(value))
            return wrong_type(value, what, "a bool");
        if (f->kind == SLIDE_PY_BOOL)
            *(bool *)at = value == Py_True;
        else
            *(int32_t *)at = value == Py_True;
        return 0;
    case SLIDE_PY_DOUBLE:
        return read_double(f, value, what, (double *)at);
    case SLIDE_PY_FLOAT:
        if (read_double(f, value, what, &real))
            return -1;
        *(float *)at = (float)real;
        return 0;
    case SLIDE_PY_STR:
        return slide_py_str(value, what, (const char **)at);
    case SLIDE_PY_PATH:
        return read_path(value, what, (const char **)at, keep);
    case SLIDE_PY_CHOICE:
        return read_choice(value, what, f->choices, (int *)at);
    }
    return -1;
}

PyObject *slide_py_item(PyObject *dict, const char *key, PyObject *keep)
{
    PyObject *name = PyUnicode_FromString(key);
    if (!name)
        return NULL;
    PyObject *value = PyDict_GetItemWithError(dict, name);
    Py_DECREF(name);
    return value && !PyList_Append(keep, value) ? value : NULL;
}

PyObject *slide_py_dict(PyObject *mapping, const char *what, PyObject *keep)
{
    if (PyDict_Check(mapping))
        return mapping;
    if (!PyObject_HasAttrString(mapping, "keys")) {
        wrong_type(mapping, what, "a dict");
        return NULL;
    }
    PyObject *dict = PyDict_New();
    bool good = dict && !PyDict_Update(dict, mapping) && !PyList_Append(keep, dict);
    Py_XDECREF(dict);
    return good ? dict : NULL;
}

static bool known(PyObject *key, const struct slide_py_field *field, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (PyUnicode_CompareWithASCIIString(key, field[i].key) == 0)
            return true;
    return false;
}

int slide_py_fields(PyObject *dict, const char *what, const struct slide_py_field *field,
                    size_t count, void *base, PyObject *keep)
{
    PyObject *key, *ignored;
    Py_ssize_t at = 0;
    char name[160];
    if (!PyDict_Check(dict))
        return wrong_type(dict, what, "a dict");
    /* No code of anybody's runs in this loop, so the dict stays as it is. */
    while (PyDict_Next(dict, &at, &key, &ignored)) {
        if (!PyUnicode_Check(key))
            return wrong_type(key, what, "a str as key");
        if (!known(key, field, count)) {
            PyErr_Format(PyExc_TypeError, "%s: unknown key %.200R", what, key);
            return -1;
        }
    }
    for (size_t i = 0; i < count; i++) {
        PyObject *value = slide_py_item(dict, field[i].key, keep);
        if (!value && PyErr_Occurred())
            return -1;
        if (!value && field[i].required) {
            PyErr_Format(PyExc_TypeError, "%s: '%s' is missing", what, field[i].key);
            return -1;
        }
        PyOS_snprintf(name, sizeof name, "%s: %s", what, field[i].key);
        if (value && slide_py_value(&field[i], value, name, base, keep))
            return -1;
    }
    return 0;
}
