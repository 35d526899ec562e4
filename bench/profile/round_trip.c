// Round trips of a 2,200 byte message between two processes over a Unix socket, with so many microseconds of polling on
// either side before blocking: the measurement behind "Bounded polling around a message" in docs/design.md.
//
//   cc -O2 bench/profile/round_trip.c -o build/round_trip
//   build/round_trip SERVER_POLL_US CLIENT_POLL_US GAP_US
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { kRounds = 3000, kMessage = 2200, kBuffer = 4096 };

static long now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000L + t.tv_nsec;
}

static int by_size(const void* a, const void* b) {
  const long x = *(const long*)a, y = *(const long*)b;
  return x < y ? -1 : x > y;
}

static long receive(int fd, char* buffer, long poll_ns) {
  for (const long until = now_ns() + poll_ns; now_ns() < until;) {
    const long n = recv(fd, buffer, kBuffer, MSG_DONTWAIT);
    if (n >= 0) return n;
    sched_yield();  // whoever wants the processor goes first
  }
  return recv(fd, buffer, kBuffer, 0);
}

int main(int argc, char** argv) {
  if (argc != 4) return fprintf(stderr, "usage: round_trip SERVER_POLL_US CLIENT_POLL_US GAP_US\n"), 2;
  const long server_ns = atol(argv[1]) * 1000, client_ns = atol(argv[2]) * 1000, gap_ns = atol(argv[3]) * 1000;
  int pair[2];
  char buffer[kBuffer] = {0};
  if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) != 0) return perror("socketpair"), 1;
  if (fork() == 0) {  // the server: answers until EOF
    close(pair[0]);
    for (long n; (n = receive(pair[1], buffer, server_ns)) > 0;) send(pair[1], buffer, n, 0);
    _exit(0);
  }
  close(pair[1]);
  static long taken[kRounds];
  for (int i = 0; i < kRounds; ++i) {
    for (const long until = now_ns() + gap_ns; now_ns() < until;) {
    }
    const long begin = now_ns();
    send(pair[0], buffer, kMessage, 0);
    receive(pair[0], buffer, client_ns);
    taken[i] = now_ns() - begin;
  }
  qsort(taken, kRounds, sizeof taken[0], by_size);
  printf("p50 %.1f us, p99 %.1f us\n", taken[kRounds / 2] / 1e3, taken[kRounds * 99 / 100] / 1e3);
  return 0;
}
