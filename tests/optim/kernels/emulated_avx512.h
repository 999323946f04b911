/* The AVX-512 intrinsics of csrc/loops.h in C with AVX2, for machines without AVX-512: see test_emulated_avx512.py.
 *
 * With -DSWAPPED, _mm512_cvtps_pd swaps two elements: a negative control. */

#define EMULATED static inline __attribute__((always_inline, target("avx2,f16c,fma")))

EMULATED __m512i emulated_set1_epi64(long long value) {
    __m512i result;
    for (int i = 0; i < 8; i++) result[i] = value;
    return result;
}

EMULATED __m512i emulated_mul_epu32(__m512i a, __m512i b) {
    __m512i result;
    for (int i = 0; i < 8; i++) result[i] = (long long)((a[i] & 0xffffffffULL) * (b[i] & 0xffffffffULL));
    return result;
}

EMULATED __m512d emulated_cvtps_pd(__m256 values) {
    __m512d result;
    for (int i = 0; i < 8; i++) result[i] = values[i];
#ifdef SWAPPED
    result[0] = values[1];
    result[1] = values[0];
#endif
    return result;
}

EMULATED __m512d emulated_fmadd_pd(__m512d a, __m512d b, __m512d c) {
    __m512d result;
    for (int i = 0; i < 8; i++) result[i] = __builtin_fma(a[i], b[i], c[i]);
    return result;
}

EMULATED __m512i emulated_cvtepu16_epi32(__m256i values) {
    uint16_t narrow[16];
    uint32_t wide[16];
    __m512i result;
    memcpy(narrow, &values, sizeof narrow);
    for (int i = 0; i < 16; i++) wide[i] = narrow[i];
    memcpy(&result, wide, sizeof result);
    return result;
}

EMULATED __m512i emulated_slli_epi32(__m512i values, unsigned count) {
    uint32_t words[16];
    memcpy(words, &values, sizeof words);
    for (int i = 0; i < 16; i++) words[i] <<= count;
    memcpy(&values, words, sizeof values);
    return values;
}

EMULATED __m512 emulated_cvtph_ps(__m256i values) {
    __m256 halves[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(values)), _mm256_cvtph_ps(_mm256_extracti128_si256(values, 1))};
    __m512 result;
    memcpy(&result, halves, sizeof result);
    return result;
}

EMULATED void emulated_storeu_ps(void *to, __m512 values) { memcpy(to, &values, sizeof values); }

#define _mm512_set1_epi64 emulated_set1_epi64
#define _mm512_mul_epu32 emulated_mul_epu32
#define _mm512_cvtps_pd emulated_cvtps_pd
#define _mm512_fmadd_pd emulated_fmadd_pd
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_slli_epi32 emulated_slli_epi32
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_storeu_ps emulated_storeu_ps
#define _mm512_castsi512_ps(values) ((__m512)(values))
