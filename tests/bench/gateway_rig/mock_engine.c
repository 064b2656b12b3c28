/* A server that answers as an OpenAI-compatible engine would, as fast as one core can: what stands behind each gateway
 * of the benchmark, so that the gateway is what is measured. It is no engine and reads no prompt.
 *
 *   mock_engine PORT TOKENS PACE_MS
 *
 * A body with "stream":true gets TOKENS events, one write each, PACE_MS apart (0: back to back), then the figures and
 * [DONE]; any other POST a JSON answer of the same length; GET /health and /v1/models what a router wants to see.
 * SIGTERM prints how many answers it gave.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { CONNECTIONS = 65536, ROOM = 65536, EVENTS = 256 };

struct connection {
    char *in;
    int filled, left, chunked;  /* tokens of a stream that are still to come */
    double due;
    int next, previous, listed; /* in the list of streams */
};

static struct connection connections[CONNECTIONS];
static int first_stream = -1, tokens;
static double pace;
static long answers, aborted;
static volatile sig_atomic_t stopped;
static char json[ROOM], event[512], last[1024];
static int json_size, event_size, last_size;

static void stop(int number) { (void)number; stopped = 1; }

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static int say(int fd, const char *text, int size) {
    while (size > 0) {
        int wrote = send(fd, text, size, MSG_NOSIGNAL);
        if (wrote > 0) { text += wrote; size -= wrote; }
        else if (errno == EAGAIN) { struct timespec wait = {0, 100000}; nanosleep(&wait, 0); }
        else return -1;
    }
    return 0;
}

static void unlist(int fd) {
    struct connection *c = &connections[fd];
    if (!c->listed) return;
    if (c->previous >= 0) connections[c->previous].next = c->next; else first_stream = c->next;
    if (c->next >= 0) connections[c->next].previous = c->previous;
    c->listed = 0;
}

static void enlist(int fd) {
    struct connection *c = &connections[fd];
    c->next = first_stream; c->previous = -1; c->listed = 1;
    if (first_stream >= 0) connections[first_stream].previous = fd;
    first_stream = fd;
}

static void hang_up(int fd) {
    if (connections[fd].left > 0) aborted++;
    unlist(fd);
    free(connections[fd].in);
    memset(&connections[fd], 0, sizeof connections[fd]);
    close(fd);
}

static int tell(int fd) {  /* one event, or the end */
    struct connection *c = &connections[fd];
    if (--c->left > 0) return say(fd, event, event_size);
    unlist(fd);
    answers++;
    return say(fd, last, last_size);
}

static int request(int fd, char *head, char *body, int size) {
    static const char stream[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    struct connection *c = &connections[fd];
    char saved = body[size], answer[256];
    int streams;
    if (!strncmp(head, "GET", 3)) {
        static const char models[] = "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":1,\"owned_by\":\"x\"}]}";
        int length = snprintf(answer, sizeof answer, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s", sizeof models - 1, models);
        return say(fd, answer, length);
    }
    body[size] = 0;
    streams = strstr(body, "\"stream\":true") || strstr(body, "\"stream\": true");
    body[size] = saved;
    if (!streams) { answers++; return say(fd, json, json_size); }
    c->left = tokens + 1;
    if (say(fd, stream, sizeof stream - 1)) return -1;
    if (pace > 0) { c->due = seconds() + pace; enlist(fd); return 0; }
    while (c->left > 0) if (tell(fd)) return -1;
    return 0;
}

static int arrived(int fd) {
    struct connection *c = &connections[fd];
    if (!c->in) c->in = malloc(ROOM + 1);
    int got = recv(fd, c->in + c->filled, ROOM - c->filled, 0);
    if (got <= 0) return got < 0 && errno == EAGAIN ? 0 : -1;
    c->filled += got;
    for (;;) {
        c->in[c->filled] = 0;
        char *end = strstr(c->in, "\r\n\r\n");
        if (!end) return c->filled == ROOM ? -1 : 0;
        char *length = strcasestr(c->in, "content-length:");
        char *coded = strcasestr(c->in, "transfer-encoding:");
        char *body = end + 4;
        int size = length && length < end ? atoi(length + 15) : 0, taken;
        if (coded && coded < end) {  /* a router may send chunks: the last one is enough to find the end */
            char *stop_at = memmem(body, c->filled - (body - c->in), "0\r\n\r\n", 5);
            if (!stop_at) return c->filled == ROOM ? -1 : 0;
            size = stop_at - body;
            taken = stop_at + 5 - c->in;
        } else taken = body + size - c->in;
        if (c->filled < taken) return taken > ROOM ? -1 : 0;
        if (request(fd, c->in, body, size)) return -1;
        memmove(c->in, c->in + taken, c->filled - taken);
        c->filled -= taken;
        if (!c->filled) return 0;
    }
}

int main(int count, char **words) {
    if (count != 4) return 64;
    tokens = atoi(words[2]);
    pace = atof(words[3]) / 1000.0;
    char text[ROOM / 2] = "", chunk[480];
    for (int i = 0; i < tokens; i++) strcat(text, "word ");
    char body[ROOM - 512];
    int size = snprintf(body, sizeof body, "{\"id\":\"c\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"%s\"},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":16,\"completion_tokens\":%d,\"total_tokens\":%d}}", text, tokens, tokens + 16);
    json_size = snprintf(json, sizeof json, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", size, body);
    size = snprintf(chunk, sizeof chunk, "data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"word \"},\"finish_reason\":null}]}\n\n");
    event_size = snprintf(event, sizeof event, "%x\r\n%s\r\n", size, chunk);
    size = snprintf(chunk, sizeof chunk, "data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[],\"usage\":{\"prompt_tokens\":16,\"completion_tokens\":%d,\"total_tokens\":%d}}\n\n", tokens, tokens + 16);
    last_size = snprintf(last, sizeof last, "%x\r\n%s\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", size, chunk);
    signal(SIGTERM, stop);
    signal(SIGPIPE, SIG_IGN);
    int server = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), on = 1, epoll = epoll_create1(0);
    setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(words[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(server, (struct sockaddr *)&address, sizeof address) || listen(server, 4096)) { perror("listen"); return 1; }
    struct epoll_event wish = {.events = EPOLLIN, .data.fd = server}, events[EVENTS];
    epoll_ctl(epoll, EPOLL_CTL_ADD, server, &wish);
    while (!stopped) {
        int ready = epoll_wait(epoll, events, EVENTS, first_stream >= 0 ? 1 : 200);
        for (int i = 0; i < ready; i++) {
            int fd = events[i].data.fd;
            if (fd == server) {
                int client;
                while ((client = accept4(server, 0, 0, SOCK_NONBLOCK)) >= 0) {
                    if (client >= CONNECTIONS) { close(client); continue; }
                    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
                    memset(&connections[client], 0, sizeof connections[client]);
                    struct epoll_event mine = {.events = EPOLLIN, .data.fd = client};
                    epoll_ctl(epoll, EPOLL_CTL_ADD, client, &mine);
                }
            } else if (arrived(fd)) hang_up(fd);
        }
        if (first_stream >= 0) {
            double now = seconds();
            for (int fd = first_stream, next; fd >= 0; fd = next) {
                struct connection *c = &connections[fd];
                next = c->next;
                if (now >= c->due) { c->due += pace; if (tell(fd)) hang_up(fd); }
            }
        }
    }
    printf("{\"answers\": %ld, \"aborted\": %ld}\n", answers, aborted);
    return 0;
}
