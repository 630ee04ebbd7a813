// Four numbers of a vector in a lane: two pairs, which RoPE rotates in keys. A warp takes as many tokens at once as fit,
// at least one.

#define QUADS (HEAD_DIM / 4)
#define ABREAST (QUADS < 32 ? 32 / QUADS : 1)  // tokens at a time

struct __align__(2 * sizeof(Word)) Words {
    Word x, y;
};
struct __align__(4) Halves {
    Half x, y;
};

// Two neighbouring pairs: RoPE rotates numbers 0 and 1 together, and 2 and 3. at: indices of the four in the vector.
// apart: true if the first pair's numbers are PAIRS apart. beside: true if the four are two times two neighbours from
// even indices; false for halves of an odd length. turned: true for a pair that RoPE rotates.
struct Quad {
    int at[4], pair;
    bool apart, beside, turned[2];

    __device__ __forceinline__ Quad(const LeveledSections& job, int kind, int quad) : pair(2 * quad) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            bool halves = pair + i < PAIRS && !INTERLEAVED;
            at[2 * i] = halves ? pair + i : 2 * (pair + i);
            at[2 * i + 1] = halves ? pair + i + PAIRS : 2 * (pair + i) + 1;
            turned[i] = kind == 0 && pair + i < PAIRS;
        }
        apart = pair < PAIRS && !INTERLEAVED;
        beside = PAIRS % 2 == 0 || INTERLEAVED || !apart;
    }
    // `fetch` reads the four numbers from a vector, `leave` writes. T: type of a number. Two: type of two neighbours.
    template <typename Two, typename T>
    __device__ __forceinline__ void fetch(const T* vector, T (&x)[4], bool aligned) const {
        if (aligned && beside) {
            Two one = *(const Two*)(vector + at[0]), other = *(const Two*)(vector + (apart ? at[1] : at[2]));
            x[0] = one.x, x[1] = apart ? other.x : one.y, x[2] = apart ? one.y : other.x, x[3] = other.y;
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = vector[at[i]];
        }
    }
    template <typename Two, typename T>
    __device__ __forceinline__ void leave(T* vector, const T (&x)[4], bool aligned) const {
        if (aligned && beside) {
            *(Two*)(vector + at[0]) = Two{x[0], apart ? x[2] : x[1]};
            *(Two*)(vector + (apart ? at[1] : at[2])) = Two{apart ? x[1] : x[2], x[3]};
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) vector[at[i]] = x[i];
        }
    }
    // Rotate by the angles of token t, or back.
    template <bool BACK>
    __device__ __forceinline__ void turn(const LeveledSections& job, const float* cosines, int t, float (&x)[4]) const {
        if (!turned[0] && !turned[1]) return;
        const float scale = BACK ? 1.f / job.rope_scale : job.rope_scale;
        const float *cosine = cosines + t * PAIRS + pair, *sine = cosine + job.block_tokens * PAIRS;
        float2 c, s;
        if constexpr (PAIRS % 2 == 0) c = *(const float2*)cosine, s = *(const float2*)sine;
        else c = {cosine[0], turned[1] ? cosine[1] : 0.f}, s = {sine[0], turned[1] ? sine[1] : 0.f};
        half_turn<BACK>(c.x * scale, s.x * scale, x[0], x[1]);
        if (turned[1]) half_turn<BACK>(c.y * scale, s.y * scale, x[2], x[3]);
    }
    template <bool BACK>
    __device__ __forceinline__ static void half_turn(float c, float s, float& first, float& second) {
        const float one = first;
        if (BACK) s = -s;
        first = one * c - second * s;
        second = second * c + one * s;
    }
};

