"""DQN on a small corridor: replay buffer, target network, Boltzmann exploration whose temperature is annealed."""

import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Args:
    total_timesteps: int = 40
    learning_starts: int = 8
    batch_size: int = 8
    gamma: float = 0.97
    lr: float = 3e-3
    tau: float = 0.2
    target_every: int = 4
    temperature: float = 1.0
    anneal_over: int = 20
    eval_every: int = 10
    run_dir: str = "runs"


class Corridor:
    """Walk right to the end of a corridor; a step costs a little, the end pays."""

    def __init__(self, length=7):
        self.length = length

    def reset(self):
        self.position, self.time = 0, 0
        return self.observe()

    def observe(self):
        return F.one_hot(torch.tensor(self.position), self.length).float()

    def step(self, action):
        self.position = min(max(self.position + (1 if action == 1 else -1 if action == 0 else 0), 0), self.length - 1)
        self.time += 1
        arrived = self.position == self.length - 1
        return self.observe(), (1.0 if arrived else -0.02), arrived or self.time >= 15


class ReplayBuffer:
    def __init__(self, capacity=500):
        self.memory = deque(maxlen=capacity)

    def __len__(self):
        return len(self.memory)

    def push(self, *transition):
        self.memory.append(transition)

    def sample(self, n):
        obs, actions, rewards, following, done = zip(*random.sample(self.memory, n))
        obs, following, done = torch.stack(obs), torch.stack(following), torch.tensor(done).float()
        return obs, torch.tensor(actions), torch.tensor(rewards), following, done


class QNetwork(nn.Module):
    def __init__(self, observations=7, actions=3, hidden=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(observations, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.value, self.advantage = nn.Linear(hidden, 1), nn.Linear(hidden, actions)

    def forward(self, x):
        h = self.body(x)
        a = self.advantage(h)
        return self.value(h) + a - a.mean(-1, keepdim=True)


class Agent:
    def __init__(self, args):
        self.args = args
        self.q, self.target = QNetwork(), QNetwork()
        self.target.load_state_dict(self.q.state_dict())
        self.optimizer = torch.optim.RMSprop(self.q.parameters(), lr=args.lr)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.3, total_iters=30)
        self.updates = 0

    def temperature(self, t):
        return max(0.0, self.args.temperature * (1 - t / self.args.anneal_over))

    @torch.no_grad()
    def act(self, obs, t):
        q = self.q(obs.unsqueeze(0))
        probs = torch.softmax(q / self.temperature(t), dim=-1)
        return torch.multinomial(probs, 1).item()

    def learn(self, obs, actions, rewards, following, done):
        with torch.no_grad():
            best = self.q(following).argmax(1, keepdim=True)
            target = rewards + self.args.gamma * (1 - done) * self.target(following).gather(1, best).squeeze(1)
        q = self.q(obs)
        td_loss = F.smooth_l1_loss(q.gather(1, actions[:, None]).squeeze(1), target)
        entropy = torch.distributions.Categorical(logits=q).entropy().mean()
        loss = td_loss - 1e-3 * entropy
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(self.q.parameters(), 10.0)
        self.optimizer.step()
        self.schedule.step()
        self.updates += 1
        if self.updates % self.args.target_every == 0:
            for old, new in zip(self.target.parameters(), self.q.parameters()):
                old.data.lerp_(new.data, self.args.tau)
        return loss.item()


def evaluate(agent):
    env = Corridor()
    obs, done, total = env.reset(), False, 0.0
    while not done:
        with torch.no_grad():
            obs, reward, done = env.step(agent.q(obs.unsqueeze(0)).argmax().item())
        total += reward
    return total


def main():
    args = Args()
    random.seed(1)
    torch.manual_seed(1)
    Path(args.run_dir).mkdir(exist_ok=True)
    env, agent, buffer = Corridor(), Agent(args), ReplayBuffer()
    obs = env.reset()
    for t in range(args.total_timesteps):
        action = agent.act(obs, t)
        following, reward, done = env.step(action)
        buffer.push(obs, action, reward, following, done)
        obs = env.reset() if done else following
        if len(buffer) >= args.learning_starts:
            loss = agent.learn(*buffer.sample(args.batch_size))
            print(f"t={t} loss={loss:.5f} temperature={agent.temperature(t):.2f}")
        if t % args.eval_every == args.eval_every - 1:
            print(f"t={t} return={evaluate(agent):.2f}")
            torch.save(agent.q.state_dict(), Path(args.run_dir) / "q.pt")


if __name__ == "__main__":
    main()
