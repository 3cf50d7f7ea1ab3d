/* The copy core of copying.py in C: tables of rows with the interpreter lock released, small checked copies with it.
 *
 * It must not know caches, leases or peers, and it checks arrays but no addresses: those are the caller's word.
 * copying.py says what each function promises; it also holds the same functions without this extension. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#if !defined(__linux__) || UINTPTR_MAX != UINT64_MAX
#error "only for 64-bit Linux; the package works without this extension"
#endif

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

/* Most bytes between two looks at the flag. */
#define COPY_PIECE ((uint64_t)256 * 1024)
#define READ_PIECE ((uint64_t)1024 * 1024)
/* The kernel's limit on one process_vm_readv. */
#define MOST_IOVECS 1024

/* All measured. Rows of 1 KiB and more that are not in the caches are written a fifth to a half faster past them. A job
 * that fits into the caches may be there already, and then memcpy is faster. */
#define STREAM_TOTAL ((uint64_t)2 * 1024 * 1024)
#define STREAM_ROW ((uint64_t)1024)
/* How far ahead of the copy the source is fetched, in bytes; and of a later row's beginning, how much and how many rows
 * ahead. Without the latter, short rows wait for their first bytes and their page's address most of the time. */
#define AHEAD 1024
#define ROWS_AHEAD 2

/* --- copying -------------------------------------------------------------------------------------------------------- */

#if defined(__x86_64__)

/* 64 bytes to an aligned destination, past the caches. Wider registers are not faster: memory sets the pace. */
static inline void stream_line(char *destination, const char *source)
{
    __m128i a = _mm_loadu_si128((const __m128i *)source);
    __m128i b = _mm_loadu_si128((const __m128i *)(source + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(source + 32));
    __m128i d = _mm_loadu_si128((const __m128i *)(source + 48));
    _mm_stream_si128((__m128i *)destination, a);
    _mm_stream_si128((__m128i *)(destination + 16), b);
    _mm_stream_si128((__m128i *)(destination + 32), c);
    _mm_stream_si128((__m128i *)(destination + 48), d);
}

/* At least 64 bytes. Ends without a fence. */
static void stream(char *destination, const char *source, size_t nbytes)
{
    size_t head = -(uintptr_t)destination & 63;
    memcpy(destination, source, head);
    size_t at = head;
    for (; at + 128 + AHEAD <= nbytes; at += 128) {
        _mm_prefetch(source + at + AHEAD, _MM_HINT_NTA);
        _mm_prefetch(source + at + AHEAD + 64, _MM_HINT_NTA);
        stream_line(destination + at, source + at);
        stream_line(destination + at + 64, source + at + 64);
    }
    for (; at + 64 <= nbytes; at += 64)
        stream_line(destination + at, source + at);
    memcpy(destination + at, source + at, nbytes - at);
}

/* Streamed stores become visible in order with later ones; loads of the copy come before later loads. */
static inline void finish_stores(void) { _mm_sfence(); }
static inline void finish_loads(void) { _mm_lfence(); } /* string instructions are not ordered like plain loads */

#else

static void stream(char *destination, const char *source, size_t nbytes) { memcpy(destination, source, nbytes); }
static inline void finish_stores(void) {}
static inline void finish_loads(void) { __atomic_thread_fence(__ATOMIC_ACQUIRE); }

#endif

static inline uint64_t load_acquire(uint64_t address)
{
    return __atomic_load_n((const uint64_t *)(uintptr_t)address, __ATOMIC_ACQUIRE);
}

/* --- CancelFlag ----------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    unsigned char value;
} Flag;

typedef struct {
    PyTypeObject *flag_type;
} State;

static inline int flag_is_set(const Flag *flag) { return __atomic_load_n(&flag->value, __ATOMIC_ACQUIRE); }

static PyObject *flag_set(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    __atomic_store_n(&((Flag *)self)->value, 1, __ATOMIC_RELEASE);
    Py_RETURN_NONE;
}

static PyObject *flag_get(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(flag_is_set((Flag *)self));
}

static void flag_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef flag_methods[] = {
    {"set", flag_set, METH_NOARGS, "Stop the copies that look at this flag. It is never reset."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef flag_properties[] = {
    {"is_set", flag_get, NULL, "Whether set() was called.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot flag_slots[] = {
    {Py_tp_doc, "Tells a running copy to stop."},
    {Py_tp_dealloc, flag_dealloc},
    {Py_tp_methods, flag_methods},
    {Py_tp_getset, flag_properties},
    {0, NULL},
};

static PyType_Spec flag_spec = {
    .name = "kvpull_async.memory._speedups.CancelFlag",
    .basicsize = sizeof(Flag),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = flag_slots,
};

/* A borrowed flag; it lives as long as the caller's arguments, and so longer than the copy. */
static const Flag *flag_of(PyObject *module, PyObject *object)
{
    const State *state = PyModule_GetState(module);
    if (Py_TYPE(object) == state->flag_type)
        return (const Flag *)object;
    PyErr_Format(PyExc_TypeError, "flag must be a CancelFlag, not %.100s", Py_TYPE(object)->tp_name);
    return NULL;
}

/* --- tables of rows ------------------------------------------------------------------------------------------------- */

typedef struct {
    Py_buffer views[3];
    int held;
    const uint64_t *destinations, *sources, *lengths;
    Py_ssize_t rows;
    uint64_t total;
} Table;

static void table_release(Table *table)
{
    while (table->held)
        PyBuffer_Release(&table->views[--table->held]);
}

static int is_int64(const Py_buffer *view)
{
    const char *format = view->format ? view->format : "B";
    if (*format == '@' || *format == '=' || *format == (PY_BIG_ENDIAN ? '>' : '<'))
        format++;
    return view->itemsize == 8 && *format && strchr("lLqQ", *format) && !format[1];
}

static int table_column(Table *table, PyObject *array, const char *name)
{
    Py_buffer *view = &table->views[table->held];
    if (!PyObject_CheckBuffer(array)) {
        PyErr_Format(PyExc_TypeError, "%s must be an array, not %.100s", name, Py_TYPE(array)->tp_name);
        return -1;
    }
    if (PyObject_GetBuffer(array, view, PyBUF_FORMAT | PyBUF_STRIDES) < 0)
        return -1;
    table->held++;
    if (!is_int64(view))
        PyErr_Format(PyExc_TypeError, "%s must hold int64 or uint64, not %.20s", name, view->format);
    else if (view->ndim != 1 || !PyBuffer_IsContiguous(view, 'C') || (uintptr_t)view->buf % 8)
        PyErr_Format(PyExc_ValueError, "%s must be one-dimensional, contiguous and aligned", name);
    else
        return 0;
    return -1;
}

static int table_measure(Table *table)
{
    for (Py_ssize_t row = 0; row < table->rows; row++) {
        uint64_t length = table->lengths[row];
        if (length >> 63 || (table->total += length) >> 63) {
            PyErr_SetString(PyExc_ValueError, "lengths must not be negative, nor their sum 2**63 or more");
            return -1;
        }
    }
    return 0;
}

/* 0, and then the caller releases the table; or -1 with an exception, and nothing is held. */
static int table_open(Table *table, PyObject *const *arrays)
{
    static const char *const names[] = {"destinations", "sources", "lengths"};
    table->held = 0;
    table->total = 0;
    for (int column = 0; column < 3; column++)
        if (table_column(table, arrays[column], names[column]) < 0)
            goto failed;
    table->destinations = table->views[0].buf;
    table->sources = table->views[1].buf;
    table->lengths = table->views[2].buf;
    table->rows = table->views[0].shape[0];
    if (table->views[1].shape[0] != table->rows || table->views[2].shape[0] != table->rows) {
        PyErr_SetString(PyExc_ValueError, "destinations, sources and lengths must be equally long");
        goto failed;
    }
    if (table_measure(table) == 0)
        return 0;
failed:
    table_release(table);
    return -1;
}

static int expect_arguments(const char *name, Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, %zd were given", name, wanted, given);
    return -1;
}

static int as_words(PyObject *const *objects, uint64_t *words, int n)
{
    for (int i = 0; i < n; i++) {
        words[i] = PyLong_AsUnsignedLongLong(objects[i]);
        if (words[i] == UINT64_MAX && PyErr_Occurred())
            return -1;
    }
    return 0;
}

static inline void fetch_beginning(const Table *table, Py_ssize_t row)
{
    if (row < table->rows) {
        uint64_t nbytes = table->lengths[row] < AHEAD ? table->lengths[row] : AHEAD;
        for (uint64_t at = 0; at < nbytes; at += 64)
            __builtin_prefetch((const char *)(uintptr_t)(table->sources[row] + at), 0, 0);
    }
}

/* Copies in order until all is done or the flag is set; the bytes copied. Needs no interpreter. */
static uint64_t copy_table(const Table *table, const Flag *flag)
{
    uint64_t done = 0;
    int large = table->total >= STREAM_TOTAL;
    for (Py_ssize_t row = 0; row < table->rows; row++) {
        char *destination = (char *)(uintptr_t)table->destinations[row];
        const char *source = (const char *)(uintptr_t)table->sources[row];
        if (large)
            fetch_beginning(table, row + ROWS_AHEAD);
        int streamed = large && table->lengths[row] >= STREAM_ROW;
        for (uint64_t left = table->lengths[row]; left;) {
            if (flag && flag_is_set(flag))
                goto out;
            size_t piece = left < COPY_PIECE ? left : COPY_PIECE;
            if (streamed && piece >= 64)
                stream(destination, source, piece);
            else
                memcpy(destination, source, piece);
            destination += piece;
            source += piece;
            left -= piece;
            done += piece;
        }
    }
out:
    finish_stores();
    finish_loads();
    return done;
}

static PyObject *copy_rows(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Table table;
    uint64_t done;
    if (expect_arguments("copy_rows", nargs, 4) < 0)
        return NULL;
    const Flag *flag = flag_of(module, args[3]);
    if (!flag || table_open(&table, args) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    done = copy_table(&table, flag);
    Py_END_ALLOW_THREADS
    table_release(&table);
    return PyLong_FromUnsignedLongLong(done);
}

/* --- checked copies and words --------------------------------------------------------------------------------------- */

static PyObject *copy_checked(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    uint64_t words[5]; /* destination, source, nbytes, epoch_address, epoch */
    if (expect_arguments("copy_checked", nargs, 5) < 0 || as_words(args, words, 5) < 0)
        return NULL;
    if (load_acquire(words[3]) != words[4])
        Py_RETURN_FALSE;
    if (words[2])
        memcpy((void *)(uintptr_t)words[0], (const void *)(uintptr_t)words[1], words[2]);
    finish_loads();
    return PyBool_FromLong(load_acquire(words[3]) == words[4]);
}

static PyObject *copy_rows_checked(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    Table table;
    uint64_t epoch[2]; /* its address, and what it must be */
    if (expect_arguments("copy_rows_checked", nargs, 5) < 0 || as_words(args + 3, epoch, 2) < 0 ||
        table_open(&table, args) < 0)
        return NULL;
    int same = load_acquire(epoch[0]) == epoch[1];
    if (same) {
        copy_table(&table, NULL);
        same = load_acquire(epoch[0]) == epoch[1];
    }
    table_release(&table);
    return PyBool_FromLong(same);
}

static PyObject *load_word(PyObject *Py_UNUSED(module), PyObject *argument)
{
    uint64_t address;
    if (as_words(&argument, &address, 1) < 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(load_acquire(address));
}

static PyObject *store_word(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    uint64_t words[2]; /* address, value */
    if (expect_arguments("store_word", nargs, 2) < 0 || as_words(args, words, 2) < 0)
        return NULL;
    __atomic_store_n((uint64_t *)(uintptr_t)words[0], words[1], __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    Py_RETURN_NONE;
}

/* --- another process's memory --------------------------------------------------------------------------------------- */

/* Where a table stands: the row, and the bytes of it that are done. */
typedef struct {
    Py_ssize_t row;
    uint64_t offset;
} Place;

/* Fills both vectors with at most READ_PIECE bytes from `place` on; the entries used. */
static unsigned long gather(const Table *table, Place place, struct iovec *local, struct iovec *remote)
{
    unsigned long used = 0;
    uint64_t room = READ_PIECE;
    for (; place.row < table->rows && used < MOST_IOVECS && room; place.row++, place.offset = 0) {
        uint64_t left = table->lengths[place.row] - place.offset;
        size_t piece = left < room ? left : room;
        if (!piece)
            continue;
        local[used] = (struct iovec){(void *)(uintptr_t)(table->destinations[place.row] + place.offset), piece};
        remote[used] = (struct iovec){(void *)(uintptr_t)(table->sources[place.row] + place.offset), piece};
        used++;
        room -= piece;
    }
    return used;
}

static void advance(const Table *table, Place *place, uint64_t nbytes)
{
    while (nbytes) {
        uint64_t left = table->lengths[place->row] - place->offset;
        if (nbytes < left) {
            place->offset += nbytes;
            return;
        }
        nbytes -= left;
        place->row++;
        place->offset = 0;
    }
}

/* 0 or an errno; `done` counts the bytes either way. Needs no interpreter. */
static int read_table(const Table *table, pid_t pid, const Flag *flag, struct iovec *vectors, uint64_t *done)
{
    struct iovec *local = vectors, *remote = vectors + MOST_IOVECS;
    Place place = {0, 0};
    while (*done < table->total && !flag_is_set(flag)) {
        unsigned long used = gather(table, place, local, remote);
        ssize_t read = process_vm_readv(pid, local, used, remote, used, 0);
        if (read < 0)
            return errno;
        if (read == 0)
            return EFAULT;
        advance(table, &place, (uint64_t)read);
        *done += (uint64_t)read;
    }
    finish_loads();
    return 0;
}

static PyObject *read_process(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Table table;
    uint64_t done = 0;
    int error;
    if (expect_arguments("read_process", nargs, 5) < 0)
        return NULL;
    long pid = PyLong_AsLong(args[0]);
    if (pid == -1 && PyErr_Occurred())
        return NULL;
    if (pid < 1 || pid > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "pid must be from 1 to 2**31 - 1, not %ld", pid);
    const Flag *flag = flag_of(module, args[4]);
    if (!flag || table_open(&table, args + 1) < 0)
        return NULL;
    struct iovec *vectors = PyMem_RawMalloc(2 * MOST_IOVECS * sizeof *vectors);
    if (!vectors) {
        table_release(&table);
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    error = read_table(&table, (pid_t)pid, flag, vectors, &done);
    Py_END_ALLOW_THREADS
    PyMem_RawFree(vectors);
    table_release(&table);
    if (error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromUnsignedLongLong(done);
}

/* --- the module ----------------------------------------------------------------------------------------------------- */

#define FAST(function) {#function, (PyCFunction)(void (*)(void))(function), METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    FAST(copy_rows),
    FAST(copy_checked),
    FAST(copy_rows_checked),
    FAST(store_word),
    FAST(read_process),
    {"load_word", load_word, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module)
{
    State *state = PyModule_GetState(module);
    state->flag_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &flag_spec, NULL);
    return state->flag_type ? PyModule_AddType(module, state->flag_type) : -1;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    State *state = PyModule_GetState(module);
    Py_VISIT(state->flag_type);
    return 0;
}

static int module_clear(PyObject *module)
{
    State *state = PyModule_GetState(module);
    Py_CLEAR(state->flag_type);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_speedups",
    .m_doc = "The copy core of copying.py.",
    .m_size = sizeof(State),
    .m_methods = methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__speedups(void) { return PyModuleDef_Init(&module_definition); }
