/* Linear layers with unstructured zeros: y = x W^T + b. W is stored as one bit for each entry, and the kept values.
 *
 * A matrix of R rows and C columns has N = ceil(C / 64) words of 64 bits in each row. Bit c % 64 of word c / 64 says
 * whether entry c of the row is kept. The kept values follow each other, row by row. Those of row r begin at starts[r],
 * and starts[R] is the number of all. Behind the last value there are at least 64 more, which are read and never used.
 * Inputs have 64 N columns; those from C on are zeros.
 *
 * Each row is summed by one thread in one order, so the result does not depend on the number of threads. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define X86 1
#include <immintrin.h>
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,popcnt,bmi,bmi2,fma,f16c")))
#define AVX2 __attribute__((target("avx2,fma,popcnt,bmi,bmi2,f16c")))
#endif

/* The SHA-256 of this file, which says whether a library was compiled from it. */
#ifndef SOURCE
#define SOURCE ""
#endif
const char *fedprune_source(void) { return SOURCE; }

#define GROUP 8 /* inputs that share one pass over a row of the matrix */

enum { PORTABLE = 0, WITH_AVX2 = 1, WITH_AVX512 = 2 };
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

/* The widest instructions that this processor has. */
int fedprune_level(void) {
#ifdef X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        return WITH_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        return WITH_AVX2;
#endif
    return PORTABLE;
}

static inline float float_of(uint32_t bits) {
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

static inline float of_bfloat16(uint16_t value) { return float_of((uint32_t)value << 16); }

static inline float of_float16(uint16_t value) {
    uint32_t sign = (uint32_t)(value & 0x8000) << 16, rest = value & 0x7fff;
    if (rest >= 0x7c00) /* infinite, or no number */
        return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest < 0x0400) /* subnormal: a whole number of 2^-24 */
        return (sign ? -1.0f : 1.0f) * (float)rest * 5.9604644775390625e-8f;
    return float_of(sign | ((rest << 13) + 0x38000000));
}

/* --- two rows times up to GROUP inputs ------------------------------------------------------------------------------
 *
 * Two rows that are far from each other come from memory at the same time. Each function writes to out[0], out[1], ...
 * of both rows the products with the inputs x, x + width, ... The sums of a row do not depend on the other one. */

typedef struct {
    const uint64_t *words;
    const void *values;
    float *out;
} Row;

typedef void rows_product(Row first, Row second, int64_t count, const float *x, int64_t width, int inputs);

#define ONE_BY_ONE(NAME, ONE)                                                                                          \
    static void NAME(Row first, Row second, int64_t count, const float *x, int64_t width, int inputs) {                \
        ONE(first, count, x, width, inputs);                                                                           \
        ONE(second, count, x, width, inputs);                                                                          \
    }

#define PORTABLE_ROW(NAME, TYPE, READ)                                                                                 \
    static void NAME##_row(Row row, int64_t count, const float *x, int64_t width, int inputs) {                        \
        float sums[GROUP] = {0};                                                                                       \
        const TYPE *values = row.values;                                                                               \
        for (int64_t w = 0; w < count; w++) {                                                                          \
            const float *at = x + 64 * w;                                                                              \
            for (uint64_t left = row.words[w]; left; left &= left - 1) {                                               \
                float value = READ(*values++);                                                                         \
                const float *column = at + __builtin_ctzll(left);                                                      \
                for (int i = 0; i < inputs; i++)                                                                       \
                    sums[i] += value * column[i * width];                                                              \
            }                                                                                                          \
        }                                                                                                              \
        for (int i = 0; i < inputs; i++)                                                                               \
            row.out[i] = sums[i];                                                                                      \
    }                                                                                                                  \
    ONE_BY_ONE(NAME, NAME##_row)

#define ITSELF(value) (value)
PORTABLE_ROW(portable_float32, float, ITSELF)
PORTABLE_ROW(portable_bfloat16, uint16_t, of_bfloat16)
PORTABLE_ROW(portable_float16, uint16_t, of_float16)

#ifdef X86

/* 16 values from memory, of which those of the set bits of ``mask`` are put in their places. */
AVX512 static inline __m512 expand_float32(__mmask16 mask, const float *values) {
    return _mm512_maskz_expand_ps(mask, _mm512_loadu_ps(values));
}

AVX512 static inline __m512 expand_bfloat16(__mmask16 mask, const uint16_t *values) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)values));
    return _mm512_maskz_expand_ps(mask, _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
}

AVX512 static inline __m512 expand_float16(__mmask16 mask, const uint16_t *values) {
    return _mm512_maskz_expand_ps(mask, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)values)));
}

#define AHEAD 4096 /* bytes; the processor's own prefetching stops at the end of each page */

#define AVX512_PARTS(TYPE, EXPAND, PART, WORD, VALUES)                                                                 \
    {                                                                                                                  \
        uint64_t bits = WORD;                                                                                          \
        _mm_prefetch((const char *)VALUES + AHEAD, _MM_HINT_T0);                                                       \
        _mm_prefetch((const char *)VALUES + AHEAD + 64, _MM_HINT_T0);                                                  \
        PART[0] = EXPAND((__mmask16)bits, VALUES);                                                                     \
        PART[1] = EXPAND((__mmask16)(bits >> 16), VALUES + _mm_popcnt_u32((uint32_t)bits & 0xffff));                   \
        PART[2] = EXPAND((__mmask16)(bits >> 32), VALUES + _mm_popcnt_u32((uint32_t)bits));                            \
        PART[3] = EXPAND((__mmask16)(bits >> 48), VALUES + _mm_popcnt_u64(bits & 0xffffffffffffULL));                  \
        VALUES += _mm_popcnt_u64(bits);                                                                                \
    }

#define AVX512_INPUTS(INPUTS, CHAINS, TYPE, EXPAND)                                                                    \
    {                                                                                                                  \
        const TYPE *values = first.values, *other = second.values;                                                     \
        __m512 sums[INPUTS][CHAINS], others[INPUTS][CHAINS];                                                           \
        for (int i = 0; i < INPUTS; i++)                                                                               \
            for (int k = 0; k < CHAINS; k++)                                                                           \
                sums[i][k] = others[i][k] = _mm512_setzero_ps();                                                       \
        for (int64_t w = 0; w < count; w++) {                                                                          \
            const float *at = x + 64 * w;                                                                              \
            __m512 part[4], second_part[4];                                                                            \
            AVX512_PARTS(TYPE, EXPAND, part, first.words[w], values)                                                   \
            AVX512_PARTS(TYPE, EXPAND, second_part, second.words[w], other)                                            \
            for (int i = 0; i < INPUTS; i++)                                                                           \
                for (int k = 0; k < 4; k++) {                                                                          \
                    __m512 input = _mm512_loadu_ps(at + i * width + 16 * k);                                           \
                    sums[i][k % CHAINS] = _mm512_fmadd_ps(part[k], input, sums[i][k % CHAINS]);                        \
                    others[i][k % CHAINS] = _mm512_fmadd_ps(second_part[k], input, others[i][k % CHAINS]);             \
                }                                                                                                      \
        }                                                                                                              \
        for (int i = 0; i < INPUTS; i++) {                                                                             \
            for (int k = 1; k < CHAINS; k++) {                                                                         \
                sums[i][0] = _mm512_add_ps(sums[i][0], sums[i][k]);                                                    \
                others[i][0] = _mm512_add_ps(others[i][0], others[i][k]);                                              \
            }                                                                                                          \
            first.out[i] = _mm512_reduce_add_ps(sums[i][0]);                                                           \
            second.out[i] = _mm512_reduce_add_ps(others[i][0]);                                                        \
        }                                                                                                              \
    }

#define FOR_INPUTS(DO, TYPE, READ)                                                                                     \
    switch (inputs) {                                                                                                  \
    case 1: DO(1, 2, TYPE, READ) break;                                                                                \
    case 2: DO(2, 2, TYPE, READ) break;                                                                                \
    case 3: DO(3, 1, TYPE, READ) break;                                                                                \
    case 4: DO(4, 1, TYPE, READ) break;                                                                                \
    case 5: DO(5, 1, TYPE, READ) break;                                                                                \
    case 6: DO(6, 1, TYPE, READ) break;                                                                                \
    case 7: DO(7, 1, TYPE, READ) break;                                                                                \
    default: DO(8, 1, TYPE, READ)                                                                                      \
    }

#define AVX512_ROWS(NAME, TYPE, EXPAND)                                                                                \
    AVX512 static void NAME(Row first, Row second, int64_t count, const float *x, int64_t width, int inputs) {         \
        FOR_INPUTS(AVX512_INPUTS, TYPE, EXPAND)                                                                        \
    }

AVX512_ROWS(avx512_float32, float, expand_float32)
AVX512_ROWS(avx512_bfloat16, uint16_t, expand_bfloat16)
AVX512_ROWS(avx512_float16, uint16_t, expand_float16)

/* For each 8 bits: which of the next values goes to each of 8 places; 0x80 for a place that stays zero. */
static uint8_t places[256][8];

__attribute__((constructor)) static void find_places(void) {
    for (int bits = 0; bits < 256; bits++)
        for (int place = 0, next = 0; place < 8; place++)
            places[bits][place] = bits >> place & 1 ? next++ : 0x80;
}

AVX2 static inline __m256 put(uint8_t bits, __m256 values) {
    __m256i from = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)places[bits]));
    __m256 moved = _mm256_permutevar8x32_ps(values, from);
    return _mm256_blendv_ps(moved, _mm256_setzero_ps(), _mm256_castsi256_ps(from));
}

AVX2 static inline __m256 put_float32(uint8_t bits, const float *values) { return put(bits, _mm256_loadu_ps(values)); }

AVX2 static inline __m256 put_bfloat16(uint8_t bits, const uint16_t *values) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)values));
    return put(bits, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
}

AVX2 static inline __m256 put_float16(uint8_t bits, const uint16_t *values) {
    return put(bits, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)values)));
}

AVX2 static inline float sum_of(__m256 v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

#define AVX2_INPUTS(INPUTS, CHAINS, TYPE, PUT)                                                                         \
    {                                                                                                                  \
        const TYPE *values = row.values;                                                                               \
        __m256 sums[INPUTS][CHAINS];                                                                                   \
        for (int i = 0; i < INPUTS; i++)                                                                               \
            for (int k = 0; k < CHAINS; k++)                                                                           \
                sums[i][k] = _mm256_setzero_ps();                                                                      \
        for (int64_t w = 0; w < count; w++) {                                                                          \
            uint64_t bits = row.words[w];                                                                              \
            const float *at = x + 64 * w;                                                                              \
            _mm_prefetch((const char *)values + AHEAD, _MM_HINT_T0);                                                   \
            _mm_prefetch((const char *)values + AHEAD + 64, _MM_HINT_T0);                                              \
            for (int k = 0; k < 8; k++, bits >>= 8) {                                                                  \
                __m256 part = PUT((uint8_t)bits, values);                                                              \
                values += _mm_popcnt_u32((uint8_t)bits);                                                               \
                for (int i = 0; i < INPUTS; i++)                                                                       \
                    sums[i][k % CHAINS] =                                                                              \
                        _mm256_fmadd_ps(part, _mm256_loadu_ps(at + i * width + 8 * k), sums[i][k % CHAINS]);           \
            }                                                                                                          \
        }                                                                                                              \
        for (int i = 0; i < INPUTS; i++) {                                                                             \
            for (int k = 1; k < CHAINS; k++)                                                                           \
                sums[i][0] = _mm256_add_ps(sums[i][0], sums[i][k]);                                                    \
            row.out[i] = sum_of(sums[i][0]);                                                                           \
        }                                                                                                              \
    }

#define AVX2_ROW(NAME, TYPE, PUT)                                                                                      \
    AVX2 static void NAME##_row(Row row, int64_t count, const float *x, int64_t width, int inputs) {                   \
        FOR_INPUTS(AVX2_INPUTS, TYPE, PUT)                                                                             \
    }                                                                                                                  \
    ONE_BY_ONE(NAME, NAME##_row)

AVX2_ROW(avx2_float32, float, put_float32)
AVX2_ROW(avx2_bfloat16, uint16_t, put_bfloat16)
AVX2_ROW(avx2_float16, uint16_t, put_float16)

#define PORTABLE_PRODUCTS {portable_float32, portable_bfloat16, portable_float16}
static rows_product *const PRODUCTS[3][3] = {PORTABLE_PRODUCTS,
                                            {avx2_float32, avx2_bfloat16, avx2_float16},
                                            {avx512_float32, avx512_bfloat16, avx512_float16}};
#else
static rows_product *const PRODUCTS[1][3] = {{portable_float32, portable_bfloat16, portable_float16}};
#endif

/* --- a whole layer ------------------------------------------------------------------------------------------------ */

/* Write y (inputs, rows) of x (inputs, 64 count). ``bias`` has one number for each row, or is null. ``dtype`` is that
 * of the values. ``level`` is at most fedprune_level(). */
void fedprune_linear(const float *x, int64_t inputs, int64_t count, const uint64_t *words, const int64_t *starts,
                     const void *values, const float *bias, float *y, int64_t rows, int dtype, int level, int threads) {
    rows_product *product = PRODUCTS[level][dtype];
    int64_t size = dtype == FLOAT32 ? 4 : 2, half = (rows + 1) / 2;
    (void)threads; /* unused where the compiler has no OpenMP */
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
    for (int64_t row = 0; row < half; row++) {
        int64_t other = row + half < rows ? row + half : row; /* of an odd number the last one is alone */
        for (int64_t first = 0; first < inputs; first += GROUP) {
            int some = (int)(inputs - first < GROUP ? inputs - first : GROUP);
            float sums[GROUP], other_sums[GROUP];
            Row one = {words + row * count, (const char *)values + size * starts[row], sums};
            Row two = {words + other * count, (const char *)values + size * starts[other], other_sums};
            product(one, two, count, x + first * 64 * count, 64 * count, some);
            for (int i = 0; i < some; i++) {
                y[(first + i) * rows + row] = sums[i] + (bias ? bias[row] : 0.0f);
                y[(first + i) * rows + other] = other_sums[i] + (bias ? bias[other] : 0.0f);
            }
        }
    }
}

/* --- the matrix as it was ----------------------------------------------------------------------------------------- */

typedef void dense_row(const uint64_t *words, const void *values, void *dense, int64_t columns);

#define PORTABLE_DENSE(NAME, TYPE)                                                                                     \
    static void NAME(const uint64_t *words, const void *values, void *dense, int64_t columns) {                        \
        const TYPE *from = values;                                                                                     \
        TYPE *to = dense;                                                                                              \
        memset(to, 0, sizeof(TYPE) * columns);                                                                         \
        for (int64_t column = 0; column < columns; column += 64)                                                       \
            for (uint64_t left = *words++; left; left &= left - 1)                                                     \
                to[column + __builtin_ctzll(left)] = *from++;                                                          \
    }

PORTABLE_DENSE(dense_32, uint32_t)
PORTABLE_DENSE(dense_16, uint16_t)

#ifdef X86

AVX512 static inline void unpack_32(__mmask16 mask, const uint32_t *from, uint32_t *to) {
    _mm512_storeu_si512(to, _mm512_maskz_expand_epi32(mask, _mm512_loadu_si512(from)));
}

AVX512 static inline void unpack_16(__mmask16 mask, const uint16_t *from, uint16_t *to) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(_mm512_maskz_expand_epi32(mask, wide)));
}

#define AVX512_DENSE(NAME, TYPE, UNPACK, REST)                                                                         \
    AVX512 static void NAME(const uint64_t *words, const void *values, void *dense, int64_t columns) {                 \
        const TYPE *from = values;                                                                                     \
        TYPE *to = dense;                                                                                              \
        for (; columns >= 64; columns -= 64) {                                                                         \
            uint64_t bits = *words++;                                                                                  \
            for (int k = 0; k < 4; k++, bits >>= 16, to += 16) {                                                       \
                UNPACK((__mmask16)bits, from, to);                                                                     \
                from += _mm_popcnt_u32((uint32_t)bits & 0xffff);                                                       \
            }                                                                                                          \
        }                                                                                                              \
        REST(words, from, to, columns);                                                                                \
    }

AVX512_DENSE(avx512_dense_32, uint32_t, unpack_32, dense_32)
AVX512_DENSE(avx512_dense_16, uint16_t, unpack_16, dense_16)

static dense_row *const DENSE_ROWS[3][2] = {
    {dense_32, dense_16}, {dense_32, dense_16}, {avx512_dense_32, avx512_dense_16}};
#else
static dense_row *const DENSE_ROWS[1][2] = {{dense_32, dense_16}};
#endif

/* Write the dense rows from ``first`` to before ``last`` to ``dense`` (rows, columns), in the dtype of the values. */
void fedprune_dense(int64_t columns, const uint64_t *words, const int64_t *starts, const void *values, void *dense,
                    int64_t first, int64_t last, int dtype, int level, int threads) {
    dense_row *write = DENSE_ROWS[level][dtype != FLOAT32];
    int64_t size = dtype == FLOAT32 ? 4 : 2, count = (columns + 63) / 64;
    (void)threads;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
    for (int64_t row = first; row < last; row++)
        write(words + row * count, (const char *)values + size * starts[row],
              (char *)dense + size * (row - first) * columns, columns);
}
