// Token ids as JSON has them, read into an array: what a router does with a prompt that is a list of ids.

#include <cstdint>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

bool is_white(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

bool is_digit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

// Reads the items of a JSON list, which stand in `text` from `begin` to `end`, into `ids`, and returns how many they
// are; -1: they are not all whole numbers from 0 to 2^31 - 1, written as JSON wants them. Each item but the last takes
// two bytes at least, so there is room for `(end - begin + 1) / 2` of them.
EXPORTED int64_t trunkline_read_ids(const char* text, int64_t begin, int64_t end, int32_t* ids) {
  const char *at = text + begin, *stop = text + end;
  for (int64_t count = 0;; ++at) {
    while (at < stop && is_white(*at)) ++at;
    const char* first = at;
    int64_t id = 0;
    for (; at < stop && is_digit(*at); ++at) {
      id = 10 * id + (*at - '0');
      if (id > INT32_MAX) return -1;
    }
    if (at == first || (*first == '0' && at - first > 1)) return -1;
    ids[count++] = static_cast<int32_t>(id);
    while (at < stop && is_white(*at)) ++at;
    if (at == stop) return count;
    if (*at != ',') return -1;
  }
}
