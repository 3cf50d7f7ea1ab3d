/* Tasks in flight: what they touch, and what must not happen to it meanwhile.
 *
 * The source is summed and the destination poisoned when a copy is issued. Whoever reads early reads poison, and
 * whoever changes the one or the other is seen at the end. It must not know threads or time. */

#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "emulator.h"

long long in_flight;
static Task *all_tasks;

Task *task_new(const char *function, int what, size_t count)
{
    Task *task = calloc(1, sizeof *task);
    task->function = function;
    task->what = what;
    task->count = count;
    task->items = count > 1 ? calloc(count, sizeof *task->items) : &task->only;
    task->checked = settings.checks != 0;
    return task;
}

void task_free(Task *task)
{
    if (task->items != &task->only)
        free(task->items);
    free(task->writes.spans);
    free(task->reads.spans);
    free(task);
}

void fly(Task *task)
{
    in_flight++;
    task->earlier = NULL;
    task->later = all_tasks;
    if (all_tasks != NULL)
        all_tasks->earlier = task;
    all_tasks = task;
    for (size_t index = 0; index < task->count; index++) {
        block_hold(task->items[index].to_block);
        block_hold(task->items[index].from_block);
    }
}

void land(Task *task)
{
    in_flight--;
    if (task->later != NULL)
        task->later->earlier = task->earlier;
    if (task->earlier != NULL)
        task->earlier->later = task->later;
    else
        all_tasks = task->later;
    for (size_t index = 0; index < task->count; index++) {
        block_release(task->items[index].to_block);
        block_release(task->items[index].from_block);
    }
}

/* --- races --- */

static int by_start(const void *one, const void *other)
{
    const Span *left = one, *right = other;
    return left->start < right->start ? -1 : left->start > right->start;
}

/* What the task's items write, or read: in order, and joined where they touch. */
static void note_reach(const Task *task, int writes, Reach *reach)
{
    size_t last = 0, used = 0;
    Span *spans = malloc((task->count + 1) * sizeof *spans);
    for (size_t index = 0; index < task->count; index++) {
        const Item *item = &task->items[index];
        const unsigned char *start = writes ? item->to_known : item->from_known;
        if (start != NULL)
            spans[used++] = (Span){start, start + item->nbytes};
    }
    qsort(spans, used, sizeof *spans, by_start);
    for (size_t index = 1; index < used; index++)
        if (spans[index].start > spans[last].end)
            spans[++last] = spans[index];
        else if (spans[index].end > spans[last].end)
            spans[last].end = spans[index].end;
    reach->spans = spans;
    reach->count = used == 0 ? 0 : last + 1;
}

static int meets(const Reach *reach, const unsigned char *start, size_t nbytes)
{
    size_t low = 0, high = reach->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (reach->spans[middle].end > start)
            high = middle;
        else
            low = middle + 1;
    }
    return start != NULL && low < reach->count && reach->spans[low].start < start + nbytes;
}

/* Whether the item must wait for the old task: either writes what the other touches. */
static int clash(const Item *item, const Task *old)
{
    return meets(&old->writes, item->to_known, item->nbytes) || meets(&old->reads, item->to_known, item->nbytes) ||
           meets(&old->writes, item->from_known, item->nbytes);
}

static void check_against(Task *task, const Task *old)
{
    int ordered = task->stream != NULL && (old->stream == task->stream || task->stream->ordered);
    for (size_t index = 0; index < task->count; index++) {
        Item *item = &task->items[index];
        if (!clash(item, old))
            continue;
        item->armed = -1;
        if (ordered)
            continue;
        violate("%p to %p, %zu bytes, meets a copy of %s in flight that nothing puts before it",
                (const void *)item->from_known, (const void *)item->to_known, item->nbytes, old->function);
        return;
    }
}

/* Before `task` flies: what it shares with others must be in order. Items that have to wait for an earlier task of
 * their own stream are summed and poisoned when their turn comes: `armed` is -1 until then. */
void check_races(Task *task)
{
    if (!task->checked)
        return;
    note_reach(task, 1, &task->writes);
    note_reach(task, 0, &task->reads);
    for (const Task *old = all_tasks; old != NULL; old = old->later)
        check_against(task, old);
}

/* --- bytes: without the lock --- */

static uint64_t sum_of(const unsigned char *bytes, size_t nbytes)
{
    uint64_t lanes[4] = {1, 2, 3, 4}, word;
    size_t at = 0;
    for (; at + 32 <= nbytes; at += 32)
        for (int lane = 0; lane < 4; lane++) {
            memcpy(&word, bytes + at + 8 * (size_t)lane, 8);
            lanes[lane] = (lanes[lane] ^ word) * 0x9E3779B97F4A7C15u;
        }
    for (; at < nbytes; at++)
        lanes[0] = (lanes[0] ^ bytes[at]) * 0x100000001B3u;
    return lanes[0] ^ (lanes[1] << 1) ^ (lanes[2] << 2) ^ (lanes[3] << 3);
}

static int only_poison(const unsigned char *bytes, size_t nbytes)
{
    return nbytes == 0 || (bytes[0] == POISON && memcmp(bytes, bytes + 1, nbytes - 1) == 0);
}

void arm(Task *task, Item *item)
{
    item->armed = 1;
    if (!task->checked || task->what > FILL)
        return;
    if (item->from != NULL)
        item->sum = sum_of(item->from, item->nbytes);
    if (task->stream != NULL)
        memset(item->to, POISON, item->nbytes);
}

static void check_poison(const Task *task, const Item *item, size_t start, size_t nbytes)
{
    if (task->checked && task->stream != NULL && !only_poison(item->to + start, nbytes))
        violate("%s: somebody wrote to %p, %zu bytes, while a copy to it was in flight", task->function,
                (const void *)item->to_known, item->nbytes);
}

/* Moves one half of each item, 0 or 1. The order within a batch is anybody's guess, so it is not the caller's. */
void transfer(Task *task, int half)
{
    for (size_t left = task->count; left > 0; left--) {
        Item *item = &task->items[left - 1];
        size_t start = half ? item->nbytes / 2 : 0;
        size_t nbytes = half ? item->nbytes - start : item->nbytes / 2;
        check_poison(task, item, start, nbytes);
        if (item->garbage)
            memset(item->to + start, GARBAGE, nbytes);
        else if (task->what == FILL)
            memset(item->to + start, task->value, nbytes);
        else
            memmove(item->to + start, item->from + start, nbytes);
    }
}

/* At the end of a copy. */
void inspect(Task *task)
{
    if (!task->checked || task->what != COPY)
        return;
    for (size_t index = 0; index < task->count; index++) {
        const Item *item = &task->items[index];
        if (item->garbage)
            continue;
        if (item->sum != sum_of(item->from, item->nbytes))
            violate("%s: the source %p, %zu bytes, changed while a copy from it was in flight", task->function,
                    (const void *)item->from_known, item->nbytes);
        else if (memcmp(item->to, item->from, item->nbytes) != 0)
            violate("%s: somebody wrote to %p, %zu bytes, while a copy to it was in flight", task->function,
                    (const void *)item->to_known, item->nbytes);
    }
}
