// Faults on purpose, by which `make asan` and `make tsan` prove that they would see one in the extension.
#include <climits>
#include <thread>
#include <vector>

extern "C" {

int read_beyond(int index) {
  std::vector<int> three(3);
  return three.data()[index];
}

int read_freed(int index) {
  auto* three = new int[3]{};
  int* const kept = three + index;
  delete[] three;
  return *kept;
}

int index_beyond(int index) {
  std::vector<int> three(3);
  three.reserve(100);  // the memory is there, and only the vector knows that it is not in use
  return three[index];
}

int overflow(int more) { return INT_MAX + more; }

// Two threads count without a lock.
int race(int rounds) {
  int count = 0;
  const auto add = [&] {
    for (int round = 0; round < rounds; ++round) ++count;
  };
  std::thread other(add);
  add();
  other.join();
  return count;
}
}
