#include "calls.hpp"

#include <random>

namespace kvharbor::detail {

std::string new_request_id() {
  constexpr const char* kDigits = "0123456789abcdef";
  std::random_device random;
  std::string id;
  while (id.size() < 16) id.push_back(kDigits[random() & 15]);
  return id;
}

}  // namespace kvharbor::detail
