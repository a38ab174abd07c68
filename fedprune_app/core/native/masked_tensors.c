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

/* A float16 and a bfloat16 are a float32 each; here not infinite and no NaN. */
WIDEST
static void widen_float16(const uint16_t *restrict halves, float *restrict values, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t magnitude = (uint32_t)(halves[i] & 0x7fff) << 13;
        int is_small = magnitude < 1u << 23; /* below 2^-14, without a leading 1 */
        uint32_t bits = magnitude + (is_small ? 113u << 23 : 112u << 23);
        float value;
        memcpy(&value, &bits, sizeof value);
        value -= is_small ? 0x1p-14f : 0.0f;
        values[i] = halves[i] & 0x8000 ? -value : value;
    }
}

WIDEST
static void widen_bfloat16(const uint16_t *restrict halves, float *restrict values, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)halves[i] << 16;
        memcpy(values + i, &bits, sizeof bits);
    }
}

enum { FLOAT32, FLOAT16, BFLOAT16 };

/* Return ``count`` values from ``at`` on as float32: where they lie, or in ``widened``. */
static inline const float *as_float32(const void *values, int64_t at, int64_t count, int type, float *widened) {
    if (type == FLOAT32)
        return (const float *)values + at;
    if (type == FLOAT16)
        widen_float16((const uint16_t *)values + at, widened, count);
    else
        widen_bfloat16((const uint16_t *)values + at, widened, count);
    return widened;
}

/* Add round(scale * values[k]) to ``sums`` where masks[k] keeps, and ``weight`` to ``held`` there, for each k. A mask
 * that is null keeps everything, and is not counted in ``held``, which may then be null. Products stay below 2^51. */
void fedprune_add(int64_t size, const void *const *values, const uint8_t *const *masks, int64_t num, int64_t *sums,
                  int32_t *held, double scale, int32_t weight, int type, int threads) {
    (void)threads; /* unused where the compiler has no OpenMP */
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
    for (int64_t at = 0; at < size; at += BLOCK) {
        int64_t count = MIN(BLOCK, size - at);
        float widened[BLOCK];
        for (int64_t k = 0; k < num; k++) {
            const float *addends = as_float32(values[k], at, count, type, widened);
            if (masks[k])
                add_masked(addends, masks[k] + at, sums + at, held + at, count, scale, weight);
            else
                add_dense(addends, sums + at, count, scale);
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
void fedprune_mean(int64_t size, const int64_t *sums, const int32_t *held, const float *otherwise, float *out,
                   double factor, int threads) {
    static const float zeros[BLOCK];
    (void)threads;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
    for (int64_t at = 0; at < size; at += BLOCK)
        mean_of(sums + at, held + at, otherwise ? otherwise + at : zeros, out + at, MIN(BLOCK, size - at), factor);
}

/* --- parts of the coordinates, one for each thread, where what is done depends on what lies before --------------- */

enum { PARTS = 256 }; /* at most */

static int parts_of(int64_t size, int threads) { return (int)MIN(MIN(threads, PARTS), size / BLOCK + 1); }

/* Return where a part begins. Parts are of whole blocks; the last one ends with the coordinates. */
static int64_t start_of(int part, int parts, int64_t size) {
    return MIN(size, (size / BLOCK + 1) * part / parts * BLOCK);
}

/* Make of the numbers in each part, of which part p's is in before[p + 1], those before each part. */
static void sum_up(int64_t *before, int parts) {
    for (int part = 0; part < parts; part++)
        before[part + 1] += before[part];
}

/* --- kept values: in their places among zeros, or one after the other ------------------------------------------------
 *
 * Values are moved as bits, of 1, 2, 4 or 8 bytes, and the kept ones may lie at any address. Which value comes next
 * depends on the mask. So there is a counter in place of a branch, which the processor would mispredict. */

WIDEST
static int64_t count_kept(const uint8_t *restrict mask, int64_t size) {
    int64_t found = 0;
    for (int64_t at = 0; at < size; at += BLOCK) {
        int32_t in_block = 0;
        for (int64_t i = at; i < MIN(at + BLOCK, size); i++)
            in_block += mask[i] != 0;
        found += in_block;
    }
    return found;
}

#define MOVES(TYPE)                                                                                                    \
    WIDEST static void keep_##TYPE(const uint8_t *restrict mask, const TYPE *restrict from, TYPE *restrict to,         \
                                   int64_t size) {                                                                     \
        for (int64_t i = 0; i < size; i++)                                                                             \
            to[i] = from[i] & (TYPE) - (TYPE)(mask[i] != 0);                                                           \
    }                                                                                                                  \
    static void spread_##TYPE(const uint8_t *mask, const char *from, char *to, int64_t size, int64_t num_kept) {       \
        TYPE *all = (TYPE *)to;                                                                                        \
        int64_t i = 0, next = 0;                                                                                       \
        for (; i < size && next < num_kept; i++) {                                                                     \
            TYPE value;                                                                                                \
            memcpy(&value, from + next * (int64_t)sizeof value, sizeof value);                                         \
            all[i] = value & (TYPE) - (TYPE)(mask[i] != 0);                                                            \
            next += mask[i] != 0;                                                                                      \
        }                                                                                                              \
        memset(all + i, 0, sizeof(TYPE) * (size_t)(size - i));                                                         \
    }                                                                                                                  \
    static void gather_##TYPE(const uint8_t *mask, const char *from, char *to, int64_t size, int64_t num_kept) {       \
        const TYPE *all = (const TYPE *)from;                                                                          \
        TYPE *kept = (TYPE *)to;                                                                                       \
        for (int64_t i = 0, next = 0; i < size && next < num_kept; i++) {                                              \
            kept[next] = all[i];                                                                                       \
            next += mask[i] != 0;                                                                                      \
        }                                                                                                              \
    }

MOVES(uint8_t)
MOVES(uint16_t)
MOVES(uint32_t)
MOVES(uint64_t)

/* Write the values that ``mask`` keeps to their places, and zeros elsewhere. */
void fedprune_keep(int64_t size, const uint8_t *mask, const char *from, char *to, int bytes, int threads) {
    (void)threads;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
    for (int64_t at = 0; at < size; at += BLOCK) {
        int64_t count = MIN(BLOCK, size - at);
        const void *values = from + at * bytes;
        void *places = to + at * bytes;
        switch (bytes) {
        case 1: keep_uint8_t(mask + at, values, places, count); break;
        case 2: keep_uint16_t(mask + at, values, places, count); break;
        case 4: keep_uint32_t(mask + at, values, places, count); break;
        default: keep_uint64_t(mask + at, values, places, count);
        }
    }
}

typedef void Move(const uint8_t *mask, const char *from, char *to, int64_t size, int64_t num_kept);

/* Move the ``num_kept`` values, in parts: to among all coordinates, or with ``gathers`` from there. */
static void move_parts(Move *move, int gathers, int64_t size, const uint8_t *mask, const char *from, char *to,
                       int64_t num_kept, int bytes, int threads) {
    int64_t before[PARTS + 1] = {0};
    int parts = parts_of(size, threads);
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(parts) if (parts > 1)
#endif
    for (int part = 0; part < parts - 1; part++) {
        int64_t at = start_of(part, parts, size);
        before[part + 1] = count_kept(mask + at, start_of(part + 1, parts, size) - at);
    }
    sum_up(before, parts);
    before[parts] = num_kept;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(parts) if (parts > 1)
#endif
    for (int part = 0; part < parts; part++) {
        int64_t at = start_of(part, parts, size), among_all = at * bytes, among_kept = before[part] * bytes;
        move(mask + at, from + (gathers ? among_all : among_kept), to + (gathers ? among_kept : among_all),
             start_of(part + 1, parts, size) - at, before[part + 1] - before[part]);
    }
}

#define OF_SIZE(NAME, BYTES)                                                                                           \
    ((BYTES) == 1 ? NAME##_uint8_t : (BYTES) == 2 ? NAME##_uint16_t : (BYTES) == 4 ? NAME##_uint32_t : NAME##_uint64_t)

/* Write the ``num_kept`` values to the places that ``mask`` keeps, and zeros elsewhere. ``mask`` keeps so many. */
void fedprune_spread(int64_t size, const uint8_t *mask, const char *kept, int64_t num_kept, char *all, int bytes,
                     int threads) {
    move_parts(OF_SIZE(spread, bytes), 0, size, mask, kept, all, num_kept, bytes, threads);
}

/* Write the ``num_kept`` values that ``mask`` keeps. */
void fedprune_gather(int64_t size, const uint8_t *mask, const char *all, char *kept, int64_t num_kept, int bytes,
                     int threads) {
    move_parts(OF_SIZE(gather, bytes), 1, size, mask, all, kept, num_kept, bytes, threads);
}

/* --- the order in which an expansion prunes -------------------------------------------------------------------------
 *
 * ``holders`` says how many clients kept each entry: those with the fewest go first. ``order`` has floats. Their bits
 * without the sign are in the order of their magnitudes. */

static inline uint32_t magnitude(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x7fffffffu;
}

WIDEST
static int64_t count_equal(const int32_t *restrict holders, int64_t count, int32_t level) {
    int32_t found = 0;
    for (int64_t i = 0; i < count; i++)
        found += holders[i] == level;
    return found;
}

/* Count the entries by ``holders``, which lie between 0 and ``top``. ``histogram`` has top + 1 places. */
void fedprune_levels(int64_t size, const int32_t *holders, int64_t *histogram, int64_t top, int threads) {
    enum { FEW = 24 }; /* so many passes over a block in the first cache cost less than one by table */
    (void)threads;
    memset(histogram, 0, sizeof(int64_t) * (size_t)(top + 1));
    if (top >= FEW) {
        for (int64_t i = 0; i < size; i++)
            histogram[holders[i]]++;
        return;
    }
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(+ : histogram[ : top + 1])
#endif
    for (int64_t at = 0; at < size; at += BLOCK)
        for (int64_t level = 0; level <= top; level++)
            histogram[level] += count_equal(holders + at, MIN(BLOCK, size - at), (int32_t)level);
}

/* Count the upper 16 bits of ``order`` of the entries with ``level`` holders; or, if ``high`` is not negative, the
 * lower 16 bits of those whose upper bits are ``high``. ``histogram`` has 2^16 places. */
void fedprune_histogram(int64_t size, const int32_t *holders, const void *order, int32_t level, int64_t high,
                        int64_t *histogram, int type, int threads) {
    (void)threads;
    memset(histogram, 0, sizeof(int64_t) << 16);
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(+ : histogram[ : 1 << 16])
#endif
    for (int64_t at = 0; at < size; at += BLOCK) {
        uint32_t found[BLOCK + 1];
        float widened[BLOCK];
        int64_t count = MIN(BLOCK, size - at), num = 0;
        const float *values = as_float32(order, at, count, type, widened);
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits = magnitude(values[i]);
            found[num] = bits;
            num += (holders[at + i] == level) & (high < 0 || bits >> 16 == (uint64_t)high);
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
static int64_t cut_block(const int32_t *restrict holders, const float *restrict order, int64_t count, int32_t level,
                         uint32_t threshold, uint8_t *restrict kept) {
    int32_t equal = 0;
    for (int64_t i = 0; i < count; i++) {
        int at_level = holders[i] == level;
        uint32_t bits = magnitude(order[i]);
        kept[i] = (uint8_t)((holders[i] > level) | (at_level & (bits >= threshold)));
        equal += at_level & (bits == threshold);
    }
    return equal;
}

/* Write which entries from ``at`` to ``end`` stay, as below, and return how many are equal to the threshold. */
static int64_t cut_part(const int32_t *holders, const void *order, int64_t at, int64_t end, int32_t level,
                        uint32_t threshold, int64_t equal, uint8_t *kept, int type) {
    int64_t found = 0;
    for (; at < end; at += BLOCK) {
        float widened[BLOCK];
        int64_t count = MIN(BLOCK, end - at);
        const float *values = as_float32(order, at, count, type, widened);
        int64_t in_block = cut_block(holders + at, values, count, level, threshold, kept + at);
        found += in_block;
        for (int64_t i = 0; in_block && equal > 0 && i < count; i++)
            if (holders[at + i] == level && magnitude(values[i]) == threshold) {
                kept[at + i] = 0;
                equal--;
            }
    }
    return found;
}

/* Write which entries stay: those with more holders than ``level``, and of those with as many all whose magnitude is
 * above ``threshold``, and those that are equal to it but the first ``equal``. */
void fedprune_cut(int64_t size, const int32_t *holders, const void *order, int32_t level, uint32_t threshold,
                  int64_t equal, uint8_t *kept, int type, int threads) {
    int64_t before[PARTS + 1] = {0}; /* how many are equal to the threshold before each part */
    int parts = parts_of(size, threads);
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(parts) if (parts > 1)
#endif
    for (int part = 0; part < parts - 1; part++)
        before[part + 1] = cut_part(holders, order, start_of(part, parts, size), start_of(part + 1, parts, size), level,
                                    threshold, 0, kept, type);
    sum_up(before, parts);
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(parts) if (parts > 1)
#endif
    for (int part = 0; part < parts; part++)
        cut_part(holders, order, start_of(part, parts, size), start_of(part + 1, parts, size), level, threshold,
                 equal - before[part], kept, type);
}

/* --- a stack of masks -----------------------------------------------------------------------------------------------
 *
 * Asymmetric numeral systems (Duda, arXiv:1311.2540) with 32-bit words and 24-bit probabilities. ``stack`` has the
 * state and the number of ``words`` below it; ``kept`` of 2^24 is the probability of a kept coordinate, above 0 and
 * below 2^24. Each coordinate depends on the one before it, so there is one thread. */

#define PRECISION 24
#define WHOLE (1u << PRECISION)

/* Put a mask on the stack, the last coordinate first. ``words`` has room for size / 16 + 4 words more. */
void fedprune_push(int64_t size, const uint8_t *mask, uint32_t kept, uint64_t *stack, uint32_t *words, int threads) {
    const uint64_t starts[2] = {0, WHOLE - kept}, parts[2] = {WHOLE - kept, kept};
    const uint64_t inverses[2] = {UINT64_MAX / parts[0], UINT64_MAX / parts[1]};
    uint64_t state = stack[0], num_words = stack[1];
    (void)threads;
    for (int64_t i = size - 1; i >= 0; i--) {
        int bit = mask[i] != 0;
        uint64_t part = parts[bit];
        if (state >> (64 - PRECISION) >= part) {
            words[num_words++] = (uint32_t)state;
            state >>= 32;
        }
        /* a product takes a fifth of the time of a division, and is at most 2 too small */
        uint64_t quotient = (uint64_t)(((unsigned __int128)state * inverses[bit]) >> 64);
        uint64_t rest = state - quotient * part;
        while (rest >= part) {
            quotient++;
            rest -= part;
        }
        state = quotient << PRECISION | (starts[bit] + rest);
    }
    stack[0] = state;
    stack[1] = num_words;
}

/* Take a mask from the stack. A stack that ends too early has any mask, and another state at its end. */
void fedprune_pop(int64_t size, uint8_t *mask, uint32_t kept, uint64_t *stack, const uint32_t *words, int threads) {
    const uint64_t starts[2] = {0, WHOLE - kept}, parts[2] = {WHOLE - kept, kept};
    uint64_t state = stack[0], num_words = stack[1];
    (void)threads;
    for (int64_t i = 0; i < size; i++) {
        uint64_t quantile = state & (WHOLE - 1);
        int bit = quantile >= starts[1];
        state = parts[bit] * (state >> PRECISION) + quantile - starts[bit];
        if (state >> 32 == 0 && num_words > 0)
            state = state << 32 | words[--num_words];
        mask[i] = (uint8_t)bit;
    }
    stack[0] = state;
    stack[1] = num_words;
}
