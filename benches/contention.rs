//! What it costs that all requests meet at one desk: one pool for 256 tasks beside eight pools for 32 each.
//!
//! Both variants have 256 connections in all, run on the same two threads against the same server, and take turns
//! (A B B A …), so that whatever else the machine does meets both. What counts is the processor time of the
//! client's threads, as the kernel has it; the server's is left out. Where the kernel does not tell, it is the
//! time on the wall. Read the gap, not the times: `cargo bench --bench contention`, with `-- --quick` for a look.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Uri};
use http_body_util::{BodyExt, Empty};
use idempool::Pool;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

const TASKS: usize = 256;
const POOLS: usize = 8;
const THREADS: usize = 2;
/// The kernel cuts a thread's name off after 15 bytes.
const CLIENT: &str = "bench-client";

/// Answers every head that it reads with the same few bytes, on a thread of its own.
fn server() -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    listener.set_nonblocking(true).expect("a socket for tokio");
    let address = listener.local_addr().expect("address");
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let listener = TcpListener::from_std(listener).expect("a listener");
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.set_nodelay(true);
                tokio::spawn(async move {
                    let mut bytes = [0; 4096];
                    // A GET is one segment here: every read is a request.
                    while stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {
                        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";
                        if stream.write_all(answer).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
    });
    address
}

/// So many pools that share the tasks among them, and the connections too.
fn pools(count: usize) -> Vec<Pool> {
    let each = TASKS / count;
    let pools = (0..count).map(|_| {
        Pool::builder()
            .max_connections(each)
            .max_connections_per_origin(each)
            .max_idle(each)
            .max_idle_per_origin(each)
            .max_pending_dials(each)
            .build()
    });
    pools.collect()
}

/// What a round took.
#[derive(Clone, Copy)]
struct Cost {
    wall: Duration,
    /// `None` where the kernel does not tell.
    cpu: Option<Duration>,
}

/// The processor time of the client's threads so far.
fn client_cpu() -> Option<Duration> {
    let mut nanos = 0;
    let mut threads = 0;
    for task in std::fs::read_dir("/proc/self/task").ok()? {
        let task = task.ok()?.path();
        let name = std::fs::read_to_string(task.join("comm")).ok()?;
        if name.trim_end() == CLIENT {
            let times = std::fs::read_to_string(task.join("schedstat")).ok()?;
            nanos += times.split(' ').next()?.parse::<u64>().ok()?;
            threads += 1;
        }
    }
    (threads == THREADS).then_some(Duration::from_nanos(nanos))
}

#[allow(clippy::disallowed_methods)]
fn round(runtime: &Runtime, pools: &[Pool], uri: &Uri, requests: usize) -> Cost {
    let (cpu, started) = (client_cpu(), Instant::now());
    runtime.block_on(async {
        let mut tasks = JoinSet::new();
        for task in 0..TASKS {
            let (pool, uri) = (pools[task % pools.len()].clone(), uri.clone());
            tasks.spawn(async move {
                for _ in 0..requests {
                    let request = Request::get(uri.clone()).body(Empty::<Bytes>::new());
                    let response = pool.send(request.expect("a request")).await;
                    let body = response.expect("a response").into_body().collect().await;
                    assert_eq!(body.expect("a body").to_bytes(), "hello");
                }
            });
        }
        while let Some(ended) = tasks.join_next().await {
            ended.expect("a task");
        }
    });
    let wall = started.elapsed();
    let cpu = client_cpu().zip(cpu).map(|(after, before)| after - before);
    Cost { wall, cpu }
}

/// Nanoseconds a request, lowest first.
fn per_request(costs: &[Cost], of: impl Fn(&Cost) -> Duration, requests: usize) -> Vec<u128> {
    let count = (TASKS * requests) as u128;
    let mut nanos: Vec<_> = costs
        .iter()
        .map(|cost| of(cost).as_nanos() / count)
        .collect();
    nanos.sort_unstable();
    nanos
}

fn median(sorted: &[u128]) -> u128 {
    sorted[sorted.len() / 2]
}

#[allow(clippy::cast_precision_loss)]
fn gap(one: u128, eight: u128) -> f64 {
    (one as f64 - eight as f64) / eight as f64 * 100.0
}

fn main() {
    // cargo passes `--bench`, which says nothing here.
    let quick = std::env::args().any(|argument| argument == "--quick");
    let (rounds, requests) = if quick { (8, 40) } else { (40, 100) };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name(CLIENT)
        .enable_all()
        .build()
        .expect("a runtime");
    let uri: Uri = format!("http://{}/hello", server()).parse().expect("a URI");
    let variants = [pools(1), pools(POOLS)];
    for pools in &variants {
        // Opens the connections, which is not what is measured.
        round(&runtime, pools, &uri, requests);
    }
    let mut costs = [Vec::new(), Vec::new()];
    for turn in 0..rounds {
        for variant in [turn % 2, (turn + 1) % 2] {
            costs[variant].push(round(&runtime, &variants[variant], &uri, requests));
        }
    }
    for (pools, costs) in variants.iter().zip(&costs) {
        let opened: u64 = pools
            .iter()
            .map(|pool| pool.stats().connections_opened)
            .sum();
        assert!(opened <= TASKS as u64, "a connection was not kept");
        let wall = per_request(costs, |cost| cost.wall, requests);
        println!(
            "{} pool(s): {} connections, {rounds} rounds of {} requests, wall {} ns a request",
            pools.len(),
            opened,
            TASKS * requests,
            median(&wall),
        );
    }
    let has_cpu = costs.iter().flatten().all(|cost| cost.cpu.is_some());
    let clock = if has_cpu { "cpu" } else { "wall" };
    let of = |cost: &Cost| cost.cpu.filter(|_| has_cpu).unwrap_or(cost.wall);
    let [one, eight] = costs.map(|costs| per_request(&costs, of, requests));
    for (name, nanos) in [("one pool", &one), ("eight pools", &eight)] {
        let quartile = nanos.len() / 4;
        println!(
            "{name}: {} ns of {clock} a request (half of the rounds within {} to {})",
            median(nanos),
            nanos[quartile],
            nanos[nanos.len() - 1 - quartile],
        );
    }
    let (one, eight) = (median(&one), median(&eight));
    println!(
        "contention: tasks={TASKS} threads={THREADS} one_pool_ns={one} eight_pools_ns={eight} gap_percent={:.1} clock={clock}",
        gap(one, eight),
    );
}
