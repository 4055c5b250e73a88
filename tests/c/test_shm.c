/* The shared segment and the rendezvous: room, seals, populating, and ranks that meet, disagree,
 * come twice, come late, die, or are no ranks at all. Ranks are threads here, and processes where
 * one has to die or to have limits of its own. */
#define _GNU_SOURCE 1
#include "test.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "base/shm.h"
#include "base/shm_packet.h"
#include "base/shm_room.h"

#define MIB ((size_t)1 << 20)

static int open_files(void)
{
    int count = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (dir && readdir(dir))
        count++;
    if (dir)
        closedir(dir);
    return count;
}

/* ---- room ---- */

struct tree {
    char root[64];
};

static void tree_new(struct tree *tree)
{
    strcpy(tree->root, "/tmp/slide-room-XXXXXX");
    CHECK(mkdtemp(tree->root));
}

static void tree_put(struct tree *tree, const char *path, const char *text)
{
    char full[512];
    snprintf(full, sizeof full, "%s%s", tree->root, path);
    for (char *slash = full + strlen(tree->root) + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = '\0';
        mkdir(full, 0700);
        *slash = '/';
    }
    FILE *file = fopen(full, "w");
    if (CHECK(file)) {
        fputs(text, file);
        fclose(file);
    }
}

static void tree_free(const char *path)
{
    DIR *dir = opendir(path);
    struct dirent *entry;
    char full[512];
    while (dir && (entry = readdir(dir))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        snprintf(full, sizeof full, "%.200s/%.255s", path, entry->d_name);
        if (unlink(full))
            tree_free(full);
    }
    if (dir)
        closedir(dir);
    rmdir(path);
}

static void check_room(struct tree *tree, uint64_t expected, const char *source)
{
    uint64_t room = 0;
    char from[256];
    slide_shm_room_at(tree->root, true, &room, from, sizeof from);
    CHECK_EQ(room, expected);
    CHECK(!strcmp(from, source) || !CHECK_HAS(from, source));
}

#define V2_MOUNT "31 23 0:28 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
#define V1_MOUNT                                                                                   \
    "30 31 0:30 / /cg/cpu rw - cgroup cgroup rw,cpu\n31 30 0:32 / /cg/mem rw - cgroup c "          \
    "rw,memory\n"

static void room_of_trees(void)
{
    struct tree tree;
    tree_new(&tree);
    check_room(&tree, UINT64_MAX, "no limit found");
    tree_put(&tree, "/proc/meminfo", "MemTotal: 9 kB\nMemFree: 8 kB\nMemAvailable:    1000 kB\n");
    check_room(&tree, 1024000, "MemAvailable of /proc/meminfo");

    /* Version 2: our own group has no limit, the one above has; its idle cache counts as free. */
    tree_put(&tree, "/proc/self/mountinfo", "1 2 0:1 / / rw - ext4 /dev/x rw\n" V2_MOUNT);
    tree_put(&tree, "/proc/self/cgroup", "4:memory:/elsewhere\n0::/job.slice/step\n");
    tree_put(&tree, "/sys/fs/cgroup/job.slice/step/memory.max", "max\n");
    tree_put(&tree, "/sys/fs/cgroup/job.slice/step/memory.current", "5000\n");
    check_room(&tree, 1024000, "MemAvailable of /proc/meminfo");
    tree_put(&tree, "/sys/fs/cgroup/job.slice/memory.max", "9000\n");
    tree_put(&tree, "/sys/fs/cgroup/job.slice/memory.current", "6000\n");
    check_room(&tree, 3000, "cgroup limit /sys/fs/cgroup/job.slice/memory.max");
    tree_put(&tree, "/sys/fs/cgroup/job.slice/memory.stat",
             "anon 3000\nfile 2500\ninactive_file 2000\nactive_file 500\n");
    check_room(&tree, 5000, "cgroup limit /sys/fs/cgroup/job.slice/memory.max");
    tree_put(&tree, "/sys/fs/cgroup/job.slice/step/memory.max", "5001\n");
    check_room(&tree, 1, "cgroup limit /sys/fs/cgroup/job.slice/step/memory.max");
    tree_put(&tree, "/sys/fs/cgroup/job.slice/step/memory.max", "4000\n"); /* lowered since */
    check_room(&tree, 0, "cgroup limit /sys/fs/cgroup/job.slice/step/memory.max");
    tree_free(tree.root);

    /* A container that sees its own group as the top of the mount. */
    tree_new(&tree);
    tree_put(&tree, "/proc/self/mountinfo",
             "31 23 0:28 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
    tree_put(&tree, "/proc/self/cgroup", "0::/docker/abc\n");
    tree_put(&tree, "/sys/fs/cgroup/memory.max", "700\n");
    tree_put(&tree, "/sys/fs/cgroup/memory.current", "100\n");
    check_room(&tree, 600, "cgroup limit /sys/fs/cgroup/memory.max");
    tree_put(&tree, "/proc/self/cgroup", "0::/../other\n"); /* outside of our namespace */
    check_room(&tree, 600, "cgroup limit /sys/fs/cgroup/memory.max");
    tree_free(tree.root);

    tree_new(&tree);
    tree_put(&tree, "/proc/self/mountinfo", V1_MOUNT);
    tree_put(&tree, "/proc/self/cgroup", "5:cpu,cpuacct:/no\n4:hugetlb,memory:/a/b\n0::/\n");
    tree_put(&tree, "/cg/mem/a/b/memory.limit_in_bytes", "9223372036854771712\n");
    tree_put(&tree, "/cg/mem/a/b/memory.usage_in_bytes", "10\n");
    tree_put(&tree, "/cg/mem/a/memory.limit_in_bytes", "5000\n");
    tree_put(&tree, "/cg/mem/a/memory.usage_in_bytes", "4000\n");
    tree_put(&tree, "/cg/mem/a/memory.stat", "inactive_file 1\ntotal_inactive_file 50\n");
    check_room(&tree, 1050, "cgroup limit /cg/mem/a/memory.limit_in_bytes");
    tree_free(tree.root);
}

static void room_here(void)
{
    uint64_t room = 0;
    char source[256] = "";
    slide_shm_room(&room, source, sizeof source);
    CHECK(room > MIB && room < UINT64_MAX);
    CHECK(*source);
}

/* ---- segment ---- */

static void segment(void)
{
    static const size_t sizes[] = {1, 4096, 4097, 2 * MIB, 5 * MIB + 13};
    int files = open_files();
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct slide_shm shm, other;
        struct slide_err err = SLIDE_ERR_INIT;
        if (!CHECK_OK(slide_shm_create(&shm, sizes[i], sizes[i], &err), &err))
            return;
        CHECK_EQ(shm.bytes, sizes[i]);
        CHECK_EQ(shm.base[sizes[i] - 1], 0);
        CHECK(fcntl(shm.fd, F_GETFD) & FD_CLOEXEC);
        CHECK(ftruncate(shm.fd, 0) && errno == EPERM);
        CHECK(ftruncate(shm.fd, (off_t)(2 * sizes[i])) && errno == EPERM);
        CHECK(fcntl(shm.fd, F_ADD_SEALS, F_SEAL_WRITE) && errno == EPERM);
        shm.base[sizes[i] - 1] = 42;
        if (CHECK_OK(slide_shm_map(&other, dup(shm.fd), &err), &err)) {
            CHECK_EQ(other.bytes, sizes[i]);
            CHECK_EQ(other.base[sizes[i] - 1], 42);
        }
        slide_shm_close(&other);
        slide_shm_close(&other); /* a second time is fine */
        slide_shm_close(&shm);
    }
    slide_shm_close(&(struct slide_shm){0}); /* descriptor 0 is not ours */
    CHECK(fcntl(0, F_GETFD) >= 0 || errno == EBADF);
    CHECK_EQ(open_files(), files);
}

static void segments_refused(void)
{
    int files = open_files();
    struct slide_shm shm;
    struct slide_err err = SLIDE_ERR_INIT;
    char host[65] = "";
    gethostname(host, sizeof host - 1);

    CHECK_EQ(slide_shm_create(&shm, 4096, 1ull << 60, &err), -1);
    CHECK_ERR(&err, SLIDE_EMEM, "1152921504606846976 bytes asked");
    CHECK_HAS(err.text, " bytes free (");
    CHECK_HAS(err.text, ") by ");
    CHECK_HAS(err.text, host);
    slide_shm_close(&shm);

    err = SLIDE_ERR_INIT; /* more than an address space */
    CHECK_EQ(slide_shm_create(&shm, (size_t)1 << 52, 0, &err), -1);
    CHECK_ERR(&err, SLIDE_EMEM, "4503599627370496 bytes asked");
    err = SLIDE_ERR_INIT;
    CHECK_EQ(slide_shm_create(&shm, 0, 0, &err), -1);
    CHECK_ERR(&err, SLIDE_EINVAL, "0 bytes");

    err = SLIDE_ERR_INIT;
    CHECK_EQ(slide_shm_map(&shm, -1, &err), -1);
    CHECK_ERR(&err, SLIDE_EIO, "descriptor -1");
    err = SLIDE_ERR_INIT;
    CHECK_EQ(slide_shm_map(&shm, open("/dev/null", O_RDWR | O_CLOEXEC), &err), -1);
    CHECK_ERR(&err, SLIDE_EIO, "no shared segment");
    int loose = memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    err = SLIDE_ERR_INIT;
    CHECK_EQ(ftruncate(loose, 4096), 0);
    CHECK_EQ(slide_shm_map(&shm, loose, &err), -1); /* could be shrunk under us */
    CHECK_ERR(&err, SLIDE_EIO, "not sealed");
    CHECK_EQ(open_files(), files);
}

static int resident(const struct slide_shm *shm)
{
    static unsigned char there[4096];
    int count = 0;
    mincore(shm->base, shm->bytes, there);
    for (size_t i = 0; i < (shm->bytes + 4095) / 4096 && i < sizeof there; i++)
        count += there[i] & 1;
    return count;
}

static void populate(void)
{
    if (sysconf(_SC_PAGESIZE) != 4096)
        return; /* the counts below are in pages of 4 KiB */
    struct slide_err err = SLIDE_ERR_INIT;
    struct slide_shm shm;
    if (!CHECK_OK(slide_shm_create(&shm, 8 * MIB + 100, 0, &err), &err))
        return;
    CHECK_EQ(resident(&shm), 0);
    CHECK_OK(slide_shm_populate(&shm, 5000, 0, &err), &err);
    CHECK_EQ(resident(&shm), 0);
    CHECK_OK(slide_shm_populate(&shm, 5000, 1, &err), &err);
    CHECK(resident(&shm) >= 1);
    shm.base[5000] = 7;
    int rc = slide_shm_populate_madvise(&shm, 4096, 4096, &err);
    CHECK(rc == 0 || rc == 1);
    CHECK_OK(slide_shm_populate_fallocate(&shm, 4096, 2 * 4096, &err), &err);
    struct stat stat;
    CHECK(!fstat(shm.fd, &stat) && stat.st_blocks >= 2 * 4096 / 512);
    CHECK_OK(slide_shm_populate_fallocate(&shm, 8 * MIB, 4096, &err), &err); /* the cut last page */
    CHECK_OK(slide_shm_populate(&shm, 4095, shm.bytes - 4095, &err), &err);
    CHECK_EQ(resident(&shm), 2049);
    CHECK_EQ(shm.base[5000], 7);
    CHECK_EQ(shm.base[5001], 0);

    static const size_t bad[][2] = {{0, 8 * MIB + 101}, {8 * MIB + 101, 0}, {1, SIZE_MAX}};
    for (int i = 0; i < 3; i++) {
        err = SLIDE_ERR_INIT;
        CHECK_EQ(slide_shm_populate(&shm, bad[i][0], bad[i][1], &err), -1);
        CHECK_ERR(&err, SLIDE_EINVAL, "of a shared segment of 8388708");
    }
    slide_shm_close(&shm);
}

/* A limit that came down between making the segment and taking its pages. */
static void populate_refused(void)
{
    struct tree tree;
    struct slide_shm shm;
    struct slide_err err = SLIDE_ERR_INIT;
    tree_new(&tree);
    tree_put(&tree, "/proc/meminfo", "MemAvailable: 1024 kB\n");
    if (!CHECK_OK(slide_shm_create(&shm, 4 * MIB, 0, &err), &err))
        return;
    CHECK_EQ(slide_shm_populate_at(tree.root, &shm, 0, 4 * MIB, &err), -1);
    CHECK_ERR(&err, SLIDE_EMEM, "4194304 bytes asked");
    CHECK_HAS(err.text, "1048576 bytes free (0.00 GiB) by MemAvailable");
    CHECK_EQ(resident(&shm), 0);
    err = SLIDE_ERR_INIT;
    CHECK_OK(slide_shm_populate_at(tree.root, &shm, 0, MIB, &err), &err);
    CHECK_OK(slide_shm_populate(&shm, 0, 4 * MIB, &err), &err);
    CHECK_OK(slide_shm_populate_at(tree.root, &shm, 0, 4 * MIB, &err), &err); /* nothing to take */
    slide_shm_close(&shm);
    tree_free(tree.root);
}

static int child_file_limit(void)
{
    setrlimit(RLIMIT_FSIZE, &(struct rlimit){MIB, MIB});
    struct slide_shm shm;
    struct slide_err err = SLIDE_ERR_INIT;
    if (!slide_shm_create(&shm, 2 * MIB, 0, &err))
        return 1;
    return !(err.code == SLIDE_EMEM && strstr(err.text, "by RLIMIT_FSIZE"));
}

static int child_address_limit(void)
{
    setrlimit(RLIMIT_AS, &(struct rlimit){512 * MIB, 512 * MIB});
    struct slide_shm shm;
    struct slide_err err = SLIDE_ERR_INIT;
    if (!slide_shm_create(&shm, 1024 * MIB, 1024 * MIB, &err))
        return 1;
    if (err.code != SLIDE_EMEM || !strstr(err.text, "by RLIMIT_AS"))
        return 2;
    err = SLIDE_ERR_INIT; /* no pages, but no room for the mapping either */
    if (!slide_shm_create(&shm, 1024 * MIB, 0, &err))
        return 3;
    return err.code == SLIDE_EMEM && strstr(err.text, "by RLIMIT_AS") ? 0 : 4;
}

static int in_child(int (*fn)(void))
{
    pid_t child = fork();
    if (!child)
        _exit(fn());
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

static void limits_of_a_process(void)
{
    CHECK_EQ(in_child(child_file_limit), 0);
    if (!TEST_SANITIZED) /* a sanitizer takes terabytes of address space */
        CHECK_EQ(in_child(child_address_limit), 0);
}

/* ---- rendezvous ---- */

#define RANKS 4
#define BYTES (3 * MIB)

struct rank {
    int rank, world;
    const char *name, *agreement;
    double delay; /* seconds until it comes */
    struct slide_waiter waiter;
    pthread_t thread;
    int rc, pids[RANKS];
    struct slide_err err;
    unsigned char seen;
};

static const char *fresh_name(void)
{
    static char names[8][48];
    static int next;
    char *name = names[next++ % 8];
    snprintf(name, sizeof names[0], "slidedp-test-%d-%d", (int)getpid(), next);
    return name;
}

static void *be_rank(void *arg)
{
    struct rank *r = arg;
    struct slide_shm shm = {.fd = -1};
    usleep((useconds_t)(r->delay * 1e6));
    r->rc = r->rank == 0 ? slide_shm_create(&shm, BYTES, BYTES, &r->err) : 0;
    if (!r->rc && r->rank == 0) {
        shm.base[BYTES - 1] = 99;
        r->rc =
            slide_shm_serve(&shm, r->name, r->world, r->agreement, r->pids, &r->waiter, &r->err);
    } else if (!r->rc) {
        r->rc = slide_shm_join(&shm, r->name, r->rank, r->world, r->agreement, r->pids, &r->waiter,
                               &r->err);
    }
    if (!r->rc)
        r->seen = shm.base[BYTES - 1];
    slide_shm_close(&shm);
    return NULL;
}

static void ranks_init(struct rank *ranks, int world, const char *agreement)
{
    const char *name = fresh_name();
    for (int i = 0; i < world; i++)
        ranks[i] = (struct rank){.rank = i,
                                 .world = world,
                                 .name = name,
                                 .agreement = agreement,
                                 .waiter = {.deadline = 30},
                                 .err = SLIDE_ERR_INIT};
}

/* Runs them, and looks for descriptors that they left behind. */
static void ranks_run(struct rank *ranks, int count)
{
    int files = open_files();
    for (int i = 0; i < count; i++)
        CHECK_EQ(pthread_create(&ranks[i].thread, NULL, be_rank, &ranks[i]), 0);
    for (int i = 0; i < count; i++)
        pthread_join(ranks[i].thread, NULL);
    CHECK_EQ(open_files(), files);
}

static void all_met(struct rank *ranks, int world)
{
    for (int i = 0; i < world; i++) {
        CHECK_OK(ranks[i].rc, &ranks[i].err);
        CHECK_EQ(ranks[i].seen, 99);
        for (int k = 0; k < world; k++)
            CHECK_EQ(ranks[i].pids[k], getpid());
    }
}

static void all_failed(struct rank *ranks, int count, enum slide_code code, const char *text)
{
    for (int i = 0; i < count; i++) {
        CHECK_EQ(ranks[i].rc, -1);
        CHECK_ERR(&ranks[i].err, code, text);
    }
}

static void meeting(void)
{
    struct rank ranks[RANKS];
    for (int world = 1; world <= RANKS; world++) {
        ranks_init(ranks, world, "learning_rate=1e-5\nsteps=3\n");
        ranks_run(ranks, world);
        all_met(ranks, world);
    }
    ranks_init(ranks, 3, "");
    ranks[0].delay = 0.15; /* rank 0 is the last */
    ranks_run(ranks, 3);
    all_met(ranks, 3);
    ranks_init(ranks, 3, "a=1\nb=2\n");
    ranks[1].agreement = "b=2\na=1\n"; /* says the same */
    ranks[2].delay = 0.1;
    ranks_run(ranks, 3);
    all_met(ranks, 3);
}

static void disagreement(void)
{
    struct rank ranks[RANKS];
    ranks_init(ranks, 3, "model=x\nlearning_rate=1e-5\nsteps=3\n");
    ranks[1].agreement = "model=x\nlearning_rate=1e-4\nsteps=3\n";
    ranks_run(ranks, 3);
    all_failed(ranks, 3, SLIDE_EPEER,
               "ranks disagree on learning_rate: rank 1 has 1e-4, rank 0 has 1e-5");

    /* The lowest rank that differs is told, whoever comes first. */
    ranks_init(ranks, 3, "a=1\nb=2");
    ranks[1].agreement = "a=1\n";
    ranks[1].delay = 0.1;
    ranks[2].agreement = "a=3\nb=2";
    ranks_run(ranks, 3);
    all_failed(ranks, 3, SLIDE_EPEER, "ranks disagree on b: rank 1 has none, rank 0 has 2");

    ranks_init(ranks, 2, "a=1\n");
    ranks[1].agreement = "a=1\nseed=x=y\n";
    ranks_run(ranks, 2);
    all_failed(ranks, 2, SLIDE_EPEER, "ranks disagree on seed: rank 1 has x=y, rank 0 has none");

    /* Values are not cut short for the comparison. */
    char mine[1200], theirs[1200];
    memset(mine, 'v', sizeof mine);
    memcpy(mine, "k=", 2);
    mine[1199] = '\0';
    strcpy(theirs, mine);
    theirs[1198] = 'w';
    ranks_init(ranks, 2, mine);
    ranks[1].agreement = theirs;
    ranks_run(ranks, 2);
    all_failed(ranks, 2, SLIDE_EPEER, "ranks disagree on k: rank 1 has vvv");

    char *huge = slide_mem_new(SLIDE_PACKET_TEXT + 2, NULL);
    if (!CHECK(huge))
        return;
    memset(huge, 'x', SLIDE_PACKET_TEXT);
    ranks_init(ranks, 2, huge); /* the longest that is possible */
    ranks_run(ranks, 2);
    all_met(ranks, 2);
    huge[SLIDE_PACKET_TEXT] = 'x';
    ranks_init(ranks, 2, huge);
    ranks_run(ranks, 2);
    all_failed(ranks, 2, SLIDE_EINVAL, "an agreement of 65537 bytes");
    slide_mem_free(huge);
}

static void wrong_ranks(void)
{
    struct rank ranks[RANKS];
    ranks_init(ranks, 3, "");
    ranks[2].world = 4;
    ranks_run(ranks, 3);
    all_failed(ranks, 3, SLIDE_EPEER, "rank 2 was started for 4 ranks, rank 0 for 3");

    ranks_init(ranks, 3, "");
    ranks[2].rank = 1;
    ranks_run(ranks, 3);
    all_failed(ranks, 3, SLIDE_EPEER, "two processes say they are rank 1");

    ranks_init(ranks, 2, "");
    ranks[1].rank = 2;
    ranks_run(ranks, 2);
    all_failed(ranks, 2, SLIDE_EPEER, "says it is rank 2 of 2");

    ranks_init(ranks, 3, ""); /* two rank 0: the second can't serve, the others meet */
    for (int i = 0; i < 3; i++)
        ranks[i].world = 2;
    ranks[2].rank = 0;
    ranks[2].delay = 0.2;
    ranks[1].delay = 0.6;
    ranks_run(ranks, 3);
    all_met(ranks, 2);
    CHECK_ERR(&ranks[2].err, SLIDE_EPEER, "is there a second rank 0?");

    ranks_init(ranks, 2, "");
    ranks[0].name = ranks[1].name = "";
    ranks_run(ranks, 2);
    all_failed(ranks, 2, SLIDE_EINVAL, "rendezvous name has 0 characters");
    char name[200];
    memset(name, 'n', sizeof name);
    name[108] = '\0';
    ranks_init(ranks, 2, "");
    ranks[0].name = ranks[1].name = name;
    ranks_run(ranks, 2);
    all_failed(ranks, 2, SLIDE_EINVAL, "rendezvous name has 108 characters");
    name[107] = '\0';
    ranks_init(ranks, 2, "");
    ranks[0].name = ranks[1].name = name;
    ranks_run(ranks, 2);
    all_met(ranks, 2);
}

static int stop_at_third(void *arg, struct slide_err *err)
{
    return ++*(int *)arg == 3 ? slide_err_set(err, SLIDE_EINTR, "stopped") : 0;
}

static void waits_that_end(void)
{
    struct rank ranks[RANKS];
    ranks_init(ranks, 4, ""); /* 2 and 3 never come */
    ranks[0].waiter.deadline = 0.3;
    ranks_run(ranks, 2);
    all_failed(ranks, 2, SLIDE_ETIME, "ranks 2, 3 of 4 not there after 0.3 s");

    ranks_init(ranks, 2, "");
    ranks[0].waiter.deadline = 0.1;
    ranks_run(ranks, 1);
    CHECK_ERR(&ranks[0].err, SLIDE_ETIME, "rank 1 of 2 not there after 0.1 s");
    ranks_init(ranks, 2, "");
    ranks[1].waiter.deadline = 0.1;
    ranks_run(ranks + 1, 1);
    CHECK_ERR(&ranks[1].err, SLIDE_ETIME, "rank 0 not there after 0.1 s");

    int polls = 0;
    slide_word abort_word = 1;
    for (int who = 0; who < 2; who++) {
        polls = 0;
        ranks_init(ranks, 2, "");
        ranks[who].waiter = (struct slide_waiter){.poll = stop_at_third, .arg = &polls};
        ranks_run(ranks + who, 1);
        CHECK_ERR(&ranks[who].err, SLIDE_EINTR, "stopped");
        CHECK_EQ(polls, 3);
        ranks_init(ranks, 2, "");
        ranks[who].waiter = (struct slide_waiter){.abort = &abort_word};
        ranks_run(ranks + who, 1);
        CHECK_ERR(&ranks[who].err, SLIDE_EPEER, "another rank has failed");
    }

    polls = 0; /* Ctrl-C on rank 0, while rank 1 is there */
    ranks_init(ranks, 3, "");
    ranks[0].waiter = (struct slide_waiter){.poll = stop_at_third, .arg = &polls};
    ranks[0].delay = 0;
    ranks_run(ranks, 2);
    CHECK_ERR(&ranks[0].err, SLIDE_EINTR, "stopped");
    CHECK_EQ(ranks[1].rc, -1);
    CHECK(ranks[1].err.code == SLIDE_EPEER || ranks[1].err.code == SLIDE_ETIME);

    polls = 0; /* Ctrl-C on rank 1, once it is there; rank 2 is told, too */
    ranks_init(ranks, 3, "");
    ranks[1].waiter = (struct slide_waiter){.poll = stop_at_third, .arg = &polls};
    ranks[1].delay = 0.1;
    ranks[2].delay = 0.6;
    ranks_run(ranks, 3);
    CHECK_ERR(&ranks[1].err, SLIDE_EINTR, "stopped");
    CHECK_ERR(&ranks[0].err, SLIDE_EPEER, "rank 1 left before all ranks had met");
    CHECK_ERR(&ranks[2].err, SLIDE_EPEER, "rank 1 left before all ranks had met");
}

/* ---- strangers ---- */

static int reach_raw(const char *name)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    memcpy(at.sun_path + 1, name, strlen(name));
    socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
    for (int i = 0; i < 200; i++) {
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        if (fd >= 0 && !connect(fd, (struct sockaddr *)&at, size))
            return fd;
        close(fd);
        usleep(10000);
    }
    return -1;
}

static void strangers(void)
{
    struct rank ranks[RANKS];
    uint64_t state = test_seed;
    char noise[700];
    for (size_t i = 0; i < sizeof noise; i++)
        noise[i] = (char)test_random(&state);
    struct slide_packet *p = slide_mem_new(sizeof *p, NULL);
    if (!CHECK(p))
        return;

    ranks_init(ranks, 3, "a=1\n");
    int files = open_files();
    CHECK_EQ(pthread_create(&ranks[0].thread, NULL, be_rank, &ranks[0]), 0);
    int silent = reach_raw(ranks[0].name), hasty[2 * RANKS];
    CHECK(silent >= 0);
    for (int i = 0; i < 2 * RANKS; i++)
        hasty[i] = reach_raw(ranks[0].name);
    close(hasty[0]); /* says nothing and goes */
    CHECK_EQ(send(hasty[1], noise, sizeof noise, MSG_NOSIGNAL), sizeof noise);
    CHECK_EQ(send(hasty[2], noise, 1, MSG_NOSIGNAL), 1);
    slide_packet_fill(p, SLIDE_PACKET_READY, 1, 3, NULL, 0); /* ready, but never greeted */
    CHECK_EQ(slide_packet_put(hasty[3], p, -1), 0);
    slide_packet_fill(p, SLIDE_PACKET_HELLO, 1, 3, "a=1\n", 4);
    p->text_bytes = 3; /* shorter than what is sent below */
    CHECK(send(hasty[4], p, offsetof(struct slide_packet, text) + 4, MSG_NOSIGNAL) > 0);
    p->text_bytes = 0xffffffffu;
    CHECK(send(hasty[5], p, offsetof(struct slide_packet, text) + 4, MSG_NOSIGNAL) > 0);
    slide_packet_fill(p, SLIDE_PACKET_READY, 1, 3, NULL, 0);
    CHECK_EQ(slide_packet_put(hasty[6], p, 2), 0); /* with a descriptor */
    p->magic ^= 1;
    CHECK_EQ(slide_packet_put(hasty[7], p, -1), 0);
    usleep(200000);
    for (int i = 1; i < 3; i++)
        CHECK_EQ(pthread_create(&ranks[i].thread, NULL, be_rank, &ranks[i]), 0);
    for (int i = 0; i < 3; i++)
        pthread_join(ranks[i].thread, NULL);
    all_met(ranks, 3);
    for (int i = 1; i < 2 * RANKS; i++)
        close(hasty[i]);
    close(silent);
    CHECK_EQ(open_files(), files);

    /* More silent ones than places: they are thrown out after a while, and the ranks come in. */
    ranks_init(ranks, 2, "");
    CHECK_EQ(pthread_create(&ranks[0].thread, NULL, be_rank, &ranks[0]), 0);
    int crowd[17];
    for (int i = 0; i < 17; i++)
        CHECK((crowd[i] = reach_raw(ranks[0].name)) >= 0);
    usleep(2500000);
    be_rank(&ranks[1]);
    pthread_join(ranks[0].thread, NULL);
    all_met(ranks, 2);
    for (int i = 0; i < 17; i++)
        close(crowd[i]);

    /* Another version of the protocol, and a process that lies about its pid. */
    for (int what = 0; what < 2; what++) {
        ranks_init(ranks, 2, "");
        CHECK_EQ(pthread_create(&ranks[0].thread, NULL, be_rank, &ranks[0]), 0);
        int fd = reach_raw(ranks[0].name);
        slide_packet_fill(p, SLIDE_PACKET_HELLO, 1, 2, NULL, 0);
        if (what)
            p->pid++;
        else
            p->version++;
        CHECK_EQ(slide_packet_put(fd, p, -1), 0);
        pthread_join(ranks[0].thread, NULL);
        all_failed(ranks, 1, SLIDE_EPEER, what ? "another pid namespace" : "another version");
        CHECK_EQ(slide_packet_get(fd, p, NULL), SLIDE_PACKET_GOT);
        CHECK_EQ(p->kind, SLIDE_PACKET_FAIL);
        close(fd);
    }
    slide_mem_free(p);
}

/* ---- ranks that die ---- */

static void deaths(void)
{
    struct rank ranks[RANKS];
    slide_word *there = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!CHECK(there != MAP_FAILED))
        return;

    /* Rank 1 is a process that greets and is killed; rank 2 comes later and is told. */
    ranks_init(ranks, 3, "");
    ranks[2].delay = 0.5;
    pid_t child = fork();
    if (!child) {
        struct slide_packet p;
        int fd = reach_raw(ranks[0].name);
        slide_packet_fill(&p, SLIDE_PACKET_HELLO, 1, 3, NULL, 0);
        slide_packet_put(fd, &p, -1);
        usleep(100000);
        raise(SIGKILL);
    }
    ranks[1] = ranks[2];
    ranks_run(ranks, 2);
    all_failed(ranks, 2, SLIDE_EPEER, "rank 1 left before all ranks had met");
    CHECK_EQ(waitpid(child, NULL, 0), child);

    /* Rank 0 is a process that is killed once rank 1 has greeted. */
    ranks_init(ranks, 2, "");
    child = fork();
    if (!child) {
        struct sockaddr_un at = {.sun_family = AF_UNIX};
        memcpy(at.sun_path + 1, ranks[0].name, strlen(ranks[0].name));
        int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
        if (bind(fd, (struct sockaddr *)&at,
                 (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(ranks[0].name))) ||
            listen(fd, 4))
            _exit(1);
        fd = accept(fd, NULL, NULL);
        char text[4096];
        if (recv(fd, text, sizeof text, 0) > 0)
            raise(SIGKILL);
        _exit(2);
    }
    ranks_run(ranks + 1, 1);
    all_failed(ranks + 1, 1, SLIDE_EPEER, "rank 0 left before all ranks had met");
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, SIGKILL);

    /* Processes, and one that can't map the segment: all are told why. */
    for (int narrow = 0; narrow < (TEST_SANITIZED ? 1 : 2); narrow++) {
        ranks_init(ranks, 3, "x=1\n");
        child = fork();
        if (!child) {
            if (narrow) {
                struct rlimit now = {2 * MIB, 2 * MIB}; /* less than is in use: no mapping fits */
                setrlimit(RLIMIT_AS, &now);
            }
            be_rank(&ranks[1]);
            slide_word_set(there, ranks[1].rc == 0 && ranks[1].pids[1] == getpid() ? 1 : 2);
            _exit(0);
        }
        ranks[1] = ranks[2];
        ranks_run(ranks, 2);
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK_EQ(status, 0);
        CHECK_EQ(slide_word_get(there), narrow ? 2 : 1);
        for (int i = 0; i < 2; i++) {
            CHECK_EQ(ranks[i].rc, narrow ? -1 : 0);
            if (narrow) {
                CHECK(ranks[i].err.code == SLIDE_EMEM);
                CHECK_EQ(ranks[i].err.rank, 1);
            } else {
                CHECK_EQ(ranks[i].pids[0], getpid());
                CHECK_EQ(ranks[i].pids[1], child);
            }
        }
    }
    munmap(there, 4096);
}

/* Each allocation fails in turn; whoever it hits, all ranks end with an error and leave nothing. */
static void allocations(void)
{
    int failures = 0;
    for (int n = 1; n < 50; n++) {
        struct rank ranks[RANKS];
        ranks_init(ranks, 3, "a=1\n");
        for (int i = 0; i < 3; i++)
            ranks[i].waiter.deadline = 0.6;
        slide_mem_fail_at(n);
        ranks_run(ranks, 3);
        slide_mem_fail_at(0);
        if (!ranks[0].rc && !ranks[1].rc && !ranks[2].rc)
            break;
        int hit = 0;
        for (int i = 0; i < 3; i++) {
            CHECK_EQ(ranks[i].rc, -1);
            hit += ranks[i].err.code == SLIDE_EMEM;
        }
        CHECK_EQ(hit, 1);
        failures++;
    }
    CHECK_EQ(failures, 6); /* 4 of rank 0, 1 of each other */
}

TEST_MAIN(CASE(room_of_trees), CASE(room_here), CASE(segment), CASE(segments_refused),
          CASE(populate), CASE(populate_refused), CASE(limits_of_a_process), CASE(meeting),
          CASE(disagreement), CASE(wrong_ranks), CASE(waits_that_end), CASE(strangers),
          CASE(deaths), CASE(allocations))
