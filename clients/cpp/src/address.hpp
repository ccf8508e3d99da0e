// Where a service is.
#pragma once

#include <string>

namespace kvharbor::detail {

// A gRPC target and the side socket beside it.
struct Address {
  std::string target;     // "unix:/path", percent-encoded: a target is a URI.
  std::string side_path;  // The path of the gRPC socket with ".sock" replaced by ".side", or ".side" appended.
};

// Reads an absolute path, with or without "unix:" before it. Throws InvalidField for any other, and one that is too
// long.
Address parse_address(const std::string& socket_path);

}  // namespace kvharbor::detail
