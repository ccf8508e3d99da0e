#include "address.hpp"

#include <algorithm>
#include <cctype>

#include "raising.hpp"

namespace kvharbor::detail {
namespace {

// The kernel's limit on the path of a Unix socket.
constexpr std::size_t kMaxPathBytes = 107;

std::string percent_encoded(const std::string& path) {
  constexpr const char* kDigits = "0123456789ABCDEF";
  std::string encoded;
  for (const char each : path) {
    const auto byte = static_cast<unsigned char>(each);
    if (std::isalnum(byte) != 0 || std::string("/-._~").find(each) != std::string::npos) {
      encoded.push_back(each);
    } else {
      encoded.append({'%', kDigits[byte >> 4], kDigits[byte & 15]});
    }
  }
  return encoded;
}

std::string side_path_of(const std::string& path) {
  const std::string ending = ".sock";
  const bool has_ending = path.size() >= ending.size() && path.rfind(ending) == path.size() - ending.size();
  return (has_ending ? path.substr(0, path.size() - ending.size()) : path) + ".side";
}

}  // namespace

Address parse_address(const std::string& socket_path) {
  const std::string scheme = "unix:";
  const std::string path = socket_path.rfind(scheme, 0) == 0 ? socket_path.substr(scheme.size()) : socket_path;
  if (path.empty() || path.front() != '/') {
    raise_invalid("socket_path", socket_path, "an absolute path", "name the socket of `kvharbor serve`");
  }
  const std::string side_path = side_path_of(path);
  if (std::max(path.size(), side_path.size()) > kMaxPathBytes) {
    raise_invalid("socket_path", socket_path, "at most " + std::to_string(kMaxPathBytes) + " bytes",
                  "use a shorter path");
  }
  return {scheme + percent_encoded(path), side_path};
}

}  // namespace kvharbor::detail
