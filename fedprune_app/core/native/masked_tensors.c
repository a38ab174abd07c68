/* Passes over masked tensors, each of which reads and writes every coordinate once.
 *
 * A mask has one byte for each coordinate, which is 0 where the coordinate is pruned. No result depends on the
 * number of threads: a coordinate is computed by one thread alone, and only integers are counted over coordinates.
 * The compiler must round each operation by itself (-ffp-contract=off), as PyTorch does. */

#include <stdint.h>
#include <string.h>

/* The widest instructions are chosen when the library is loaded. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#if __GNUC__ >= 12
#define WIDEST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDEST __attribute__((target_clones("avx2", "default")))
#endif
#else
#define WIDEST
#endif

/* The SHA-256 of this file, which says whether a library was compiled from it. */
#ifndef SOURCE
#define SOURCE ""
#endif
const char *fedprune_source(void) { return SOURCE; }

#define BLOCK 2048 /* coordinates whose sums stay in the processor's first cache */

#define MIN(a, b) ((a) < (b) ? (a) : (b))

/* --- sums ----------------------------------------------------------------------------------------------------------
 *
 * A float64 between 2^52 and 2^53 has its integer in its last bits. So adding 3 * 2^51 rounds a smaller number, half to
 * even, and the bits are then that integer beside a constant. */

#define SHIFT 6755399441055744.0 /* 3 * 2^51 */
#define SHIFT_BITS 0x4338000000000000LL

static inline int64_t rounded(double value) {
    double shifted = value + SHIFT;
    int64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    return bits - SHIFT_BITS;
}

WIDEST
static void add_masked(const float *restrict values, const uint8_t *restrict mask, int64_t *restrict sums,
                       int32_t *restrict held, int64_t count, double scale, int32_t weight) {
    for (int64_t i = 0; i < count; i++)
        sums[i] += rounded((double)values[i] * scale) & -(int64_t)(mask[i] != 0);
    for (int64_t i = 0; i < count; i++)
        held[i] += weight & -(int32_t)(mask[i] != 0);
}

WIDEST
static void add_dense(const float *restrict values, int64_t *restrict sums, int64_t count, double scale) {
    for (int64_t i = 0; i < count; i++)
        sums[i] += rounded((double)values[i] * scale);
}

/* Add round(scale * values[k]) to ``sums`` where masks[k] keeps, and ``weight`` to ``held`` there, for each k. A mask
 * that is null keeps everything, and is not counted in ``held``, which may then be null. Products stay below 2^51. */
void fedprune_add(const float *const *values, const uint8_t *const *masks, int64_t num, int64_t *sums, int32_t *held,
                  int64_t size, double scale, int32_t weight, int threads) {
    (void)threads; /* unused where the compiler has no OpenMP */
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
    for (int64_t at = 0; at < size; at += BLOCK) {
        int64_t count = MIN(BLOCK, size - at);
        for (int64_t k = 0; k < num; k++) {
            if (masks[k])
                add_masked(values[k] + at, masks[k] + at, sums + at, held + at, count, scale, weight);
            else
                add_dense(values[k] + at, sums + at, count, scale);
        }
    }
}

WIDEST
static void mean_of(const int64_t *restrict sums, const int32_t *restrict held, const float *restrict otherwise,
                    float *restrict out, int64_t count, double factor) {
    for (int64_t i = 0; i < count; i++)
        out[i] = (float)((double)sums[i] / (double)(held[i] + (held[i] == 0)) * factor);
    for (int64_t i = 0; i < count; i++)
        out[i] = held[i] > 0 ? out[i] : otherwise[i];
}

/* Write sums / held * factor, or ``otherwise`` where ``held`` is 0; zeros there if ``otherwise`` is null. */
void fedprune_mean(const int64_t *sums, const int32_t *held, const float *otherwise, float *out, int64_t size,
                   double factor, int threads) {
    static const float zeros[BLOCK];
    (void)threads;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
    for (int64_t at = 0; at < size; at += BLOCK)
        mean_of(sums + at, held + at, otherwise ? otherwise + at : zeros, out + at, MIN(BLOCK, size - at), factor);
}

/* --- kept values: in their places among zeros, or one after the other ---------------------------------------------------------------------------
 *
 * Values are moved as bits, of 1, 2, 4 or 8 bytes, and the kept ones may lie at any address. Which value comes next
 * depends on the mask. So there is a counter in place of a branch, which the processor would mispredict. */

#define MOVES(TYPE)                                                                                                    \
    WIDEST static void keep_##TYPE(const uint8_t *restrict mask, const TYPE *restrict from, TYPE *restrict to,         \
                                   int64_t size) {                                                                     \
        for (int64_t i = 0; i < size; i++)                                                                             \
            to[i] = from[i] & (TYPE) - (TYPE)(mask[i] != 0);                                                           \
    }                                                                                                                  \
    static void spread_##TYPE(const uint8_t *mask, const char *kept, int64_t num_kept, TYPE *all, int64_t size) {      \
        int64_t i = 0, next = 0;                                                                                       \
        for (; i < size && next < num_kept; i++) {                                                                     \
            TYPE value;                                                                                                \
            memcpy(&value, kept + next * (int64_t)sizeof value, sizeof value);                                         \
            all[i] = value & (TYPE) - (TYPE)(mask[i] != 0);                                                                   \
            next += mask[i] != 0;                                                                                      \
        }                                                                                                              \
        memset(all + i, 0, sizeof(TYPE) * (size_t)(size - i));                                                         \
    }                                                                                                                  \
    static void gather_##TYPE(const uint8_t *mask, const TYPE *all, int64_t size, TYPE *kept) {                        \
        int64_t next = 0;                                                                                              \
        for (int64_t i = 0; i < size; i++) {                                                                           \
            kept[next] = all[i];                                                                                       \
            next += mask[i] != 0;                                                                                      \
        }                                                                                                              \
    }

MOVES(uint8_t)
MOVES(uint16_t)
MOVES(uint32_t)
MOVES(uint64_t)

/* Write the values that ``mask`` keeps to their places, and zeros elsewhere. */
void fedprune_keep(const uint8_t *mask, const void *from, void *to, int64_t size, int bytes) {
    switch (bytes) {
    case 1: keep_uint8_t(mask, from, to, size); break;
    case 2: keep_uint16_t(mask, from, to, size); break;
    case 4: keep_uint32_t(mask, from, to, size); break;
    default: keep_uint64_t(mask, from, to, size);
    }
}

/* Write the ``num_kept`` values to the places that ``mask`` keeps, and zeros elsewhere. ``mask`` keeps so many. */
void fedprune_spread(const uint8_t *mask, const char *kept, int64_t num_kept, void *all, int64_t size, int bytes) {
    switch (bytes) {
    case 1: spread_uint8_t(mask, kept, num_kept, all, size); break;
    case 2: spread_uint16_t(mask, kept, num_kept, all, size); break;
    case 4: spread_uint32_t(mask, kept, num_kept, all, size); break;
    default: spread_uint64_t(mask, kept, num_kept, all, size);
    }
}

/* Write the values that ``mask`` keeps. ``kept`` has room for one more, which is written and means nothing. */
void fedprune_gather(const uint8_t *mask, const void *all, int64_t size, void *kept, int bytes) {
    switch (bytes) {
    case 1: gather_uint8_t(mask, all, size, kept); break;
    case 2: gather_uint16_t(mask, all, size, kept); break;
    case 4: gather_uint32_t(mask, all, size, kept); break;
    default: gather_uint64_t(mask, all, size, kept);
    }
}

/* --- the order in which an expansion prunes -------------------------------------------------------------------------
 *
 * ``holders`` says how many clients kept each entry: those with the fewest go first. ``order`` has the bits of floats.
 * Without their sign they are in the order of the floats' magnitudes. */

#define MAGNITUDE 0x7fffffffu

WIDEST
static int64_t count_equal(const int32_t *restrict holders, int64_t count, int32_t level) {
    int32_t found = 0;
    for (int64_t i = 0; i < count; i++)
        found += holders[i] == level;
    return found;
}

/* Count the entries by ``holders``, which lie between 0 and ``top``. ``histogram`` has top + 1 places. */
void fedprune_levels(const int32_t *holders, int64_t size, int64_t *histogram, int64_t top) {
    enum { FEW = 24 }; /* so many passes over a block in the first cache cost less than one by table */
    memset(histogram, 0, sizeof(int64_t) * (size_t)(top + 1));
    if (top >= FEW) {
        for (int64_t i = 0; i < size; i++)
            histogram[holders[i]]++;
        return;
    }
    for (int64_t at = 0; at < size; at += BLOCK)
        for (int64_t level = 0; level <= top; level++)
            histogram[level] += count_equal(holders + at, MIN(BLOCK, size - at), (int32_t)level);
}

/* Count the upper 16 bits of ``order`` of the entries with ``level`` holders; or, if ``high`` is not negative, the
 * lower 16 bits of those whose upper bits are ``high``. ``histogram`` has 2^16 places. */
void fedprune_histogram(const int32_t *holders, const uint32_t *order, int64_t size, int32_t level, int64_t high,
                        int64_t *histogram) {
    uint32_t found[BLOCK + 1];
    memset(histogram, 0, sizeof(int64_t) << 16);
    for (int64_t at = 0; at < size; at += BLOCK) {
        int64_t end = at + MIN(BLOCK, size - at), num = 0;
        for (int64_t i = at; i < end; i++) {
            uint32_t bits = order[i] & MAGNITUDE;
            found[num] = bits;
            num += (holders[i] == level) & (high < 0 || bits >> 16 == (uint64_t)high);
        }
        if (high < 0)
            for (int64_t i = 0; i < num; i++)
                histogram[found[i] >> 16]++;
        else
            for (int64_t i = 0; i < num; i++)
                histogram[found[i] & 0xffff]++;
    }
}

WIDEST
static int64_t cut_block(const int32_t *restrict holders, const uint32_t *restrict order, int64_t count, int32_t level,
                         uint32_t threshold, uint8_t *restrict kept) {
    int32_t equal = 0;
    for (int64_t i = 0; i < count; i++) {
        int at_level = holders[i] == level;
        uint32_t bits = order[i] & MAGNITUDE;
        kept[i] = (uint8_t)((holders[i] > level) | (at_level & (bits >= threshold)));
        equal += at_level & (bits == threshold);
    }
    return equal;
}

/* Write which entries stay: those with more holders than ``level``, and of those with as many all whose magnitude is
 * above ``threshold``, and those that are equal to it but the first ``equal``. */
void fedprune_cut(const int32_t *holders, const uint32_t *order, int64_t size, int32_t level, uint32_t threshold,
                  int64_t equal, uint8_t *kept) {
    for (int64_t at = 0; at < size; at += BLOCK) {
        int64_t count = MIN(BLOCK, size - at);
        if (!cut_block(holders + at, order + at, count, level, threshold, kept + at))
            continue;
        for (int64_t i = at; i < at + count && equal > 0; i++)
            if (holders[i] == level && (order[i] & MAGNITUDE) == threshold) {
                kept[i] = 0;
                equal--;
            }
    }
}
