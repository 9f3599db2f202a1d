// The same in C++, by the header that adds ownership.
#include <cstdio>
#include <kvq/kvq.hpp>

int main() {
  try {
    const kvq::Client client("/nonexistent/kvqd.sock", "outside", 10);
  } catch (const kvq::Failure& failure) {
    std::printf("%s %s\n", kvq_version(), kvq_status_name(failure.status()));
    return 0;
  }
  return 1;
}
