/* What this installation finds and uses: `slidedp env`. */
#include "py/py.h"

#include "base/env.h"
#include "base/isa.h"
#include "base/shm.h"
#include "device/device.h"

static int put(PyObject *dict, const char *key, PyObject *value)
{
    int failed = !value || PyDict_SetItemString(dict, key, value);
    Py_XDECREF(value);
    return failed;
}

/* {name: "" or why it can't run here}. The BLAS is opened first, where the caller says it lies. */
static PyObject *backends(void)
{
    PyObject *dict = PyDict_New();
    const struct slide_backend *const *list = slide_backend_list();
    for (int i = 0; dict && list[i]; i++) {
        struct slide_err err = SLIDE_ERR_INIT;
        const char *text = list[i]->available(&err) ? err.text : "";
        if (put(dict, list[i]->name, slide_py_text(text)))
            Py_CLEAR(dict);
    }
    return dict;
}

static PyObject *variables(void)
{
    int count;
    const struct slide_env_entry *entry = slide_env_list(&count);
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < count; i++) {
        PyObject *row = Py_BuildValue(
            "sNs", entry[i].name, slide_py_text(slide_env_get(entry[i].name)), entry[i].meaning);
        if (!row || PyList_Append(list, row))
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

PyObject *slide_py_env(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    static char *names[] = {"blas", "nvidia", NULL};
    PyObject *objects[2] = {NULL, NULL};
    const char *path = "", *folder = "";
    uint64_t room;
    char source[256], blas[700], cuda[2600];
    struct slide_err err = SLIDE_ERR_INIT;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OO:env", names, &objects[0], &objects[1]) ||
        (objects[0] && slide_py_str(objects[0], "blas", &path)) ||
        (objects[1] && slide_py_str(objects[1], "nvidia", &folder)))
        return NULL;
    slide_shm_room(&room, source, sizeof source);
    if (slide_backend_text("cpu", path, NULL, blas, sizeof blas, &err))
        PyOS_snprintf(blas, sizeof blas, "none: %.600s", err.text);
    err = SLIDE_ERR_INIT;
    if (slide_backend_text("cuda", NULL, folder, cuda, sizeof cuda, &err))
        PyOS_snprintf(cuda, sizeof cuda, "none: %.960s", err.text);
    PyObject *dict = PyDict_New();
    if (!dict)
        return NULL;
    if (put(dict, "isa", PyUnicode_FromString(slide_isa_name(slide_isa_get()))) ||
        put(dict, "isa_best", PyUnicode_FromString(slide_isa_name(slide_isa_best()))) ||
        put(dict, "cpus", PyLong_FromLong(slide_pool_cpus(NULL, 0))) ||
        put(dict, "blas", slide_py_text(blas)) || put(dict, "cuda", slide_py_text(cuda)) ||
        put(dict, "memory_free", PyLong_FromUnsignedLongLong(room)) ||
        put(dict, "memory_source", slide_py_text(source)) || put(dict, "backends", backends()) ||
        put(dict, "variables", variables()))
        Py_CLEAR(dict);
    return dict;
}

PyObject *slide_py_devices(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    static char *names[] = {"nvidia", NULL};
    PyObject *object = NULL;
    const char *folder = "";
    char text[2600];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:devices", names, &object) ||
        (object && slide_py_str(object, "nvidia", &folder)))
        return NULL;
    slide_backend_text("cuda", NULL, folder, text, sizeof text, NULL); /* the folder counts */
    PyObject *dict = PyDict_New();
    const struct slide_backend *const *list = slide_backend_list();
    for (int i = 0; dict && list[i]; i++) {
        long n = list[i]->available(NULL) ? 0 : list[i]->count();
        if (put(dict, list[i]->name, PyLong_FromLong(n)))
            Py_CLEAR(dict);
    }
    return dict;
}

PyObject *slide_py_model_types(PyObject *module, PyObject *ignored)
{
    (void)module;
    (void)ignored;
    PyObject *list = PyList_New(0);
    for (int i = 0; list && slide_families[i]; i++) {
        PyObject *name = PyUnicode_FromString(slide_families[i]->model_type);
        if (!name || PyList_Append(list, name))
            Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}
