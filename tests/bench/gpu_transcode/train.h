// Times of kernels without the calls that launch them: many launches in one graph, replayed.
//
// Invariant: a sample is the whole graph's time over the number of launches, between two events.
#pragma once

#include <functional>
#include <vector>

#include "tests/support/device_bytes.h"

namespace kvq::bench {

// `launch(i)` puts launch i of `launches` on the stream.
inline std::vector<double> train_us(cudaStream_t stream, int launches, int samples,
                                    const std::function<void(int)>& launch) {
  cudaGraph_t graph;
  cudaGraphExec_t train;
  cudaEvent_t begin, end;
  MUST(cudaEventCreate(&begin));
  MUST(cudaEventCreate(&end));
  MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < launches; ++i) launch(i);
  MUST(cudaStreamEndCapture(stream, &graph));
  MUST(cudaGraphInstantiate(&train, graph, 0));
  std::vector<double> us;
  for (int i = -2; i < samples; ++i) {
    MUST(cudaEventRecord(begin, stream));
    MUST(cudaGraphLaunch(train, stream));
    MUST(cudaEventRecord(end, stream));
    MUST(cudaStreamSynchronize(stream));
    float ms = 0;
    MUST(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 0) us.push_back(ms * 1000.0 / launches);
  }
  cudaGraphExecDestroy(train);
  cudaGraphDestroy(graph);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return us;
}

}  // namespace kvq::bench
