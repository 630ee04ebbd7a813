// A run: the keys, or the values, that a head of a layer has in a KV block. A warp works on a run at a time.

struct Run {
    int row, kind, layer, block, head;
    Word* x;

    __device__ __forceinline__ Run(const Sections& job, u32 run) {
        head = run % job.heads;
        block = run / job.heads % job.n;
        row = run / job.heads / job.n;
        kind = row >= job.layers, layer = row - kind * job.layers;
        x = (Word*)job.caches[layer] + job.block_ids[block] * job.block_stride + job.at[kind] + head * job.head_stride;
    }
    __device__ __forceinline__ const float* cosines(const Sections& job) const {
        return job.turns + ((i64)block * 2 * job.block_tokens + job.first_token) * PAIRS;
    }
};
