// What becomes of a child of fork().
#pragma once

#include <sys/wait.h>
#include <unistd.h>

namespace forks {

// Runs `use` in a child; returns the signal that has ended it, or else its exit status.
template <class Use>
int in_fork(Use use) {
  const pid_t child = ::fork();
  if (child == 0) {
    use();
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace forks
