/* The shared segment: a memfd. It has no name that could be left behind or be limited by a small
 * /dev/shm, and its seals mean that no peer can shrink it under a mapping (that would be a SIGBUS).
 * Pages are taken before they are used, by the ranks that own them: then a lack of memory is an
 * error of a call, and the pages lie on the owner's node.
 * Called by state/, which lays its planes out in it. */
#define _GNU_SOURCE 1
#include "shm.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shm_room.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define HUGE_PAGE ((size_t)2 << 20)
#define PIECE ((size_t)64 << 20) /* taken at once: between two, the limits are looked at */
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

static size_t page_size(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static int refuse_now(uint64_t asked, bool mapped, const char *what, struct slide_err *err)
{
    char source[256];
    uint64_t room;
    slide_shm_room_at("", mapped, &room, source, sizeof source);
    return slide_shm_refuse(asked, room, source, what, err);
}

static int open_memfd(struct slide_err *err)
{
    int fd = memfd_create("slidedp", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL) /* a kernel before 6.3 */
        fd = memfd_create("slidedp", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        slide_err_os(err, errno, "cannot create the shared segment (memfd_create)");
    return fd;
}

static int map(struct slide_shm *shm, int fd, size_t bytes, struct slide_err *err)
{
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        if (errno == ENOMEM)
            return refuse_now(bytes, false, "the mapping of the shared segment", err);
        return slide_err_os(err, errno, "cannot map the shared segment of %zu bytes", bytes);
    }
    madvise(base, bytes, MADV_DONTDUMP); /* a core file with all model states helps nobody */
    *shm = (struct slide_shm){.fd = fd, .bytes = bytes, .base = base};
    return 0;
}

int slide_shm_create(struct slide_shm *shm, size_t bytes, uint64_t resident, struct slide_err *err)
{
    *shm = (struct slide_shm){.fd = -1};
    if (!bytes)
        return slide_err_set(err, SLIDE_EINVAL, "a shared segment of 0 bytes");

    char source[256];
    uint64_t room;
    slide_shm_room(&room, source, sizeof source);
    if (resident > room)
        return slide_shm_refuse(resident, room, source, "the shared segment", err);
    /* ftruncate past this limit ends the process with SIGXFSZ. */
    struct rlimit size;
    if (!getrlimit(RLIMIT_FSIZE, &size) && size.rlim_cur < bytes)
        return slide_shm_refuse(bytes, size.rlim_cur, "RLIMIT_FSIZE", "the shared segment", err);

    int fd = open_memfd(err);
    if (fd < 0)
        return -1;
    if (ftruncate(fd, (off_t)bytes)) {
        slide_err_os(err, errno, "cannot size the shared segment to %zu bytes", bytes);
        goto fail;
    }
    if (fcntl(fd, F_ADD_SEALS, SEALS)) {
        slide_err_os(err, errno, "cannot seal the shared segment");
        goto fail;
    }
    if (map(shm, fd, bytes, err))
        goto fail;
    return 0;

fail:
    close(fd);
    return -1;
}

int slide_shm_map(struct slide_shm *shm, int fd, struct slide_err *err)
{
    *shm = (struct slide_shm){.fd = -1};
    struct stat stat;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || fstat(fd, &stat)) {
        slide_err_os(err, errno, "descriptor %d is no shared segment", fd);
        goto fail;
    }
    if ((seals & SEALS) != SEALS || stat.st_size <= 0) {
        slide_err_set(err, SLIDE_EIO, "descriptor %d is no shared segment: not sealed, or empty",
                      fd);
        goto fail;
    }
    if (map(shm, fd, (size_t)stat.st_size, err))
        goto fail;
    return 0;

fail:
    if (fd >= 0)
        close(fd);
    return -1;
}

void slide_shm_close(struct slide_shm *shm)
{
    if (!shm->base)
        return;
    munmap(shm->base, shm->bytes);
    close(shm->fd);
    *shm = (struct slide_shm){.fd = -1};
}

/* ENOMEM from the kernel; ENOSPC and, from a fault, EFAULT from the file system behind a memfd. */
static int populate_failed(int os, size_t bytes, struct slide_err *err)
{
    if (os == ENOMEM || os == ENOSPC || os == EFAULT) {
        refuse_now(bytes, true, "a part of the shared segment", err);
        if (err && err->code == SLIDE_EMEM)
            err->os = os;
        return -1;
    }
    return slide_err_os(err, os, "cannot take %zu bytes of the shared segment", bytes);
}

int slide_shm_populate_madvise(struct slide_shm *shm, size_t offset, size_t bytes,
                               struct slide_err *err)
{
    while (madvise(shm->base + offset, bytes, MADV_POPULATE_WRITE)) {
        if (errno == EINVAL) /* a kernel before 5.14 */
            return 1;
        if (errno != EINTR && errno != EAGAIN)
            return populate_failed(errno, bytes, err);
    }
    return 0;
}

int slide_shm_populate_fallocate(struct slide_shm *shm, size_t offset, size_t bytes,
                                 struct slide_err *err)
{
    int os;
    if (bytes > shm->bytes - offset) /* the last page of the file may be cut short */
        bytes = shm->bytes - offset;
    do
        os = posix_fallocate(shm->fd, (off_t)offset, (off_t)bytes);
    while (os == EINTR);
    return os ? populate_failed(os, bytes, err) : 0;
}

/* Is there room for what of the piece is not there yet? Asked again before each piece: past a
 * cgroup's limit the kernel would kill this process. */
static int check_piece(const char *root, struct slide_shm *shm, size_t offset, size_t bytes,
                       struct slide_err *err)
{
    char source[256];
    uint64_t room;
    slide_shm_room_at(root, true, &room, source, sizeof source);
    if (bytes <= room)
        return 0;

    unsigned char there[PIECE / 4096 + 1];
    uint64_t missing = 0;
    if (mincore(shm->base + offset, bytes, there))
        return slide_err_os(err, errno, "cannot look at the pages of the shared segment");
    for (size_t i = 0; i < (bytes + page_size() - 1) / page_size(); i++)
        if (!(there[i] & 1))
            missing += page_size();
    if (missing <= room)
        return 0;
    return slide_shm_refuse(missing, room, source, "a part of the shared segment", err);
}

int slide_shm_populate_at(const char *root, struct slide_shm *shm, size_t offset, size_t bytes,
                          struct slide_err *err)
{
    if (offset > shm->bytes || bytes > shm->bytes - offset)
        return slide_err_set(err, SLIDE_EINVAL, "bytes %zu to %zu of a shared segment of %zu",
                             offset, offset + bytes, shm->bytes);
    if (!bytes)
        return 0;

    /* Only a hint: whether it is heard depends on the machine's settings. */
    size_t first = (offset + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    size_t last = (offset + bytes) / HUGE_PAGE * HUGE_PAGE;
    if (first < last)
        madvise(shm->base + first, last - first, MADV_HUGEPAGE);

    size_t page = page_size(), end = offset + bytes;
    int lacking = 0;
    for (size_t at = offset / page * page; at < end;) {
        size_t next = (at / PIECE + 1) * PIECE;
        size_t stop = next < end ? next : (end + page - 1) / page * page;
        if (check_piece(root, shm, at, stop - at, err))
            return -1;
        if (!lacking) {
            lacking = slide_shm_populate_madvise(shm, at, stop - at, err);
            if (lacking < 0)
                return -1;
        }
        if (lacking && slide_shm_populate_fallocate(shm, at, stop - at, err))
            return -1;
        at = stop;
    }
    return 0;
}

int slide_shm_populate(struct slide_shm *shm, size_t offset, size_t bytes, struct slide_err *err)
{
    return slide_shm_populate_at("", shm, offset, bytes, err);
}
